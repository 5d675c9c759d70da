"""`python -m experiments.tracking`; see `run`."""

from experiments.tracking.run import main

raise SystemExit(main())
