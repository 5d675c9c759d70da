"""Worker processes of a preparation, and the pieces of work that they finish."""
