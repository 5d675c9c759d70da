"""Resident memory: tables live in shared memory that survives their worker and that its successor takes over.

`home` manages a run's folder, `segment` the memory of one worker, `allocation` puts tables there while a
model is built. `folders`, `janitor` and `cleanup` need only the standard library.
"""
