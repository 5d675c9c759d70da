"""Choice of the fastest exchange by predictions, timings and trials during training."""
