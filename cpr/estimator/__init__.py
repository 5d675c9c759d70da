"""Estimator of save intervals, recovery costs and workers to rent: measurements, formulas, simulation."""
