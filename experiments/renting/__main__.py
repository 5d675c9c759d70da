"""`python -m experiments.renting`; see `run`."""

from experiments.renting.run import main

raise SystemExit(main())
