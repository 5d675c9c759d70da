"""Recovery from failures: find what survived, decide where rows come from, restore them, report the cost."""
