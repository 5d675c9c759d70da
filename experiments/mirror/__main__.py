"""`python -m experiments.mirror`; see `run`."""

from experiments.mirror.run import main

raise SystemExit(main())
