"""`python -m experiments.streaming`."""

from experiments.streaming.run import main

raise SystemExit(main())
