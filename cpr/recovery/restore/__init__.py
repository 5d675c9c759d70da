"""Carrying out a recovery: rows are moved and loaded, and the loss is charged to PLS."""
