"""When to save, what to save, what to do after a failed save, and what saves cost."""
