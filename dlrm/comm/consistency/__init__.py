"""Checks that all ranks are in the same state before they exchange data, and propagation of errors."""
