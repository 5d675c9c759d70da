"""`cpr doctor`: checks, before a job, of a node and of the links between nodes."""
