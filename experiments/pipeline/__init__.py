"""What the schedules of a training step gain, and what a step waits for."""
