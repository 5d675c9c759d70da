"""The report of all stored results. `python -m experiments.report`."""
