"""Compression of gradients: selection of values (compressors) and their encoding (codecs)."""
