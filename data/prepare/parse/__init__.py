"""Parses raw Criteo files to typed columns and ids."""
