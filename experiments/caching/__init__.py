"""Measures what the cache gains on slow storage. `python -m experiments.caching`."""
