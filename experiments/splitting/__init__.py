"""Measures what operator splitting is worth, in bytes and in time. `python -m experiments.splitting`."""
