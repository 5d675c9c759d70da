"""`python -m experiments.full_size`; see `run`."""

from experiments.full_size.run import main

raise SystemExit(main())
