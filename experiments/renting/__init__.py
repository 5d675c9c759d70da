"""How well short runs say how many workers to rent; see `run`."""
