"""How shards outlive a worker: its tables live in shared memory that the next process picks up.

`home` has a run's place in memory, `segment` what one worker holds there, `birth` puts tables there while a
model is built. `folders`, `janitor` and `leftovers` need the standard library alone.
"""
