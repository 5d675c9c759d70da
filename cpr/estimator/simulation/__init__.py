"""Monte Carlo simulation of whole jobs with failures, compared with the formulas."""
