"""Which heads are split and how: bytes, time and memory of every strategy on a cluster."""
