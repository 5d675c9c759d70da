"""Choosing the fastest exchange: link measurements, cost formulas, and trials during training."""
