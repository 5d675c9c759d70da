"""`python -m experiments.recovery`; see `run`."""

from experiments.recovery.run import main

raise SystemExit(main())
