"""`python -m experiments.checkpointing`; see `run`."""

from experiments.checkpointing.run import main

raise SystemExit(main())
