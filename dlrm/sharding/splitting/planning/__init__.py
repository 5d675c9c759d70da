"""Chooses which heads are split and how, by bytes, time and memory of every strategy on a cluster."""
