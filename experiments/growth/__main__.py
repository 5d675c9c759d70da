"""`python -m experiments.growth`; see `run`."""

from experiments.growth.run import main

raise SystemExit(main())
