"""What each worker keeps for its successor: its memory, and what all workers have alike."""
