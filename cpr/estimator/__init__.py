"""Estimator of save intervals and recovery costs: measurements, formulas, recommendation, simulation."""
