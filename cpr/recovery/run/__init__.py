"""State of a run that survives its workers: progress, lost samples (PLS), and reports of recoveries."""
