"""Checks that all ranks are about to do the same, and how one rank tells the others that it cannot."""
