"""`python -m experiments.mirror_recovery`; see `run`."""

from experiments.mirror_recovery.run import main

raise SystemExit(main())
