"""When to save: periodic saves, saves of chosen rows, retries, and measurements of what they cost."""
