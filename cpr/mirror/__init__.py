"""Mirrors: copies of each worker's rows in the memory of another node, which outlive the loss of its own."""
