"""What grows as the work grows; see `run`."""
