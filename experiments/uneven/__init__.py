"""Workers of different speed: batches by measured speed against batches of equal size."""
