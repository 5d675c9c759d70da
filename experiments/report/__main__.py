"""`python -m experiments.report`; see `run`."""

from experiments.report.run import main

raise SystemExit(main())
