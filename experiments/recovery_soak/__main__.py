"""`python -m experiments.recovery_soak`; see `run`."""

from experiments.recovery_soak.run import main

raise SystemExit(main())
