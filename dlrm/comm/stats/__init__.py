"""Bytes and seconds of exchanges."""
