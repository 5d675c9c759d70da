"""P3: sends gradients in slices, by priority, while the next forward pass starts."""
