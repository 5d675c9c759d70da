"""Criteo in, batches out: the raw format, its preparation, a generator, the loader and its cache.

This package knows nothing of models or fault tolerance: it imports neither `dlrm` nor `cpr`.
"""
