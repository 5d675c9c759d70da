"""`python -m experiments.splitting`; see `run`."""

from experiments.harness.network import leave_tidily
from experiments.splitting.run import main

leave_tidily()
raise SystemExit(main())
