"""Data that streams in: AUC, lag, backlog and speed of training, and whether each record is trained once."""
