"""Which saves a checkpoint directory holds: found, checked, committed, merged and deleted."""
