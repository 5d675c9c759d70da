"""`python -m experiments.gpu`; see `run`."""

from experiments.gpu.run import main

raise SystemExit(main())
