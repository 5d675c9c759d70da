"""`python -m experiments.pipeline`; see `run`."""

from experiments.pipeline.run import main

raise SystemExit(main())
