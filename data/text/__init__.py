"""The text of raw files: plain, gzip or zstd (`content`), in blocks of whole lines (`streams`)."""
