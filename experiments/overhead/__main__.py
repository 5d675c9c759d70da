"""`python -m experiments.overhead`; see `run`."""

from experiments.overhead.run import main

raise SystemExit(main())
