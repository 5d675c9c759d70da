"""The seam between the training loop and `cpr`: sessions that save, recover and resume."""
