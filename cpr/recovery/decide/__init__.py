"""From what the workers still hold to a decision: full or partial recovery, and where each row comes from."""
