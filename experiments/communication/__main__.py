"""`python -m experiments.communication`; see `run`."""

from experiments.communication.run import main
from experiments.harness.network import leave_tidily

leave_tidily()
raise SystemExit(main())
