"""Decision between full and partial recovery, and the source of each row, from the memory that survived."""
