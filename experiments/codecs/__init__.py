"""Measures what lossy codecs of row saves cost in quality. `python -m experiments.codecs`."""
