"""Checkpoints of sharded models: formats, storage, saving, loading; users start at `checkpointer`."""
