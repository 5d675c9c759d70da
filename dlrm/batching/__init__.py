"""Dynamic batching: ranks of different speed get batches of different size (`train.batching=dynamic`)."""
