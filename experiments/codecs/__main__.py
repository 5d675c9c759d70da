"""`python -m experiments.codecs`; see `run`."""

from experiments.codecs.run import main

raise SystemExit(main())
