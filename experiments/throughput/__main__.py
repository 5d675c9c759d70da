"""`python -m experiments.throughput`; see `run`."""

from experiments.throughput.run import main

raise SystemExit(main())
