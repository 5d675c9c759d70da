"""Emulated runs: a job of 56 hours on 8 nodes with failures, trained by one process."""
