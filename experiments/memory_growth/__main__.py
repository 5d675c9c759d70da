"""`python -m experiments.memory_growth`; see `run`."""

from experiments.memory_growth.run import main

raise SystemExit(main())
