"""`python -m experiments.preparation`; see `run`."""

from experiments.preparation.run import main

raise SystemExit(main())
