"""Long training under many failures, every row checked. `python -m experiments.recovery_soak`."""
