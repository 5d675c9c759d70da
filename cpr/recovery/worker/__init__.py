"""What each worker keeps in shared memory for its successor: tables, and the state that all ranks share."""
