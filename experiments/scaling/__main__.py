"""`python -m experiments.scaling`; see `run`."""

from experiments.scaling.run import main

raise SystemExit(main())
