"""Training with tables as large as this machine takes; see `run`."""
