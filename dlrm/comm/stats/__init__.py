"""Measurements of exchanges: bytes and seconds."""
