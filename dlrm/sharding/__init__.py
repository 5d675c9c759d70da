"""How tables are laid over ranks, and how their rows are read and updated on each."""
