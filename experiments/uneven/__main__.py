"""`python -m experiments.uneven`."""

from experiments.uneven.run import main

raise SystemExit(main())
