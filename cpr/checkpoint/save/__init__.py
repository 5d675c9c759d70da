"""Saving: rows are staged while training waits, and a thread writes them in the background."""
