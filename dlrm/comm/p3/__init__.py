"""P3: gradients are sent in slices by priority while the next forward pass begins."""
