"""Click log data: Criteo's raw format, its preparation, a generator, the data loader and its cache.

The package is independent of models and fault tolerance: it imports neither `dlrm` nor `cpr`.
"""
