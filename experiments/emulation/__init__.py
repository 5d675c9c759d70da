"""Emulated runs: a job of 56 hours on 8 nodes, played through by one process, with failures."""
