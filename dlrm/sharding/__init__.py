"""How tables are sharded over ranks, and how their rows are looked up and updated on each."""
