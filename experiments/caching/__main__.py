"""`python -m experiments.caching`; see `run`."""

from experiments.caching.run import main

raise SystemExit(main())
