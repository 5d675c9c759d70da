"""Execution of a recovery: rows are moved and loaded, and lost samples are counted."""
