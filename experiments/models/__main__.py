"""`python -m experiments.models`; see `run`."""

from experiments.models.run import main

raise SystemExit(main())
