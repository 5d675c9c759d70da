"""Failure logs, distributions fitted to the times between failures, and simulated arrivals."""
