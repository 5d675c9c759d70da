"""What the cache is worth on slow storage. `python -m experiments.caching`."""
