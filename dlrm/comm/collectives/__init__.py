"""Collectives that sum a vector over all ranks: dense or sparse, flat or in two levels, plain or encoded."""
