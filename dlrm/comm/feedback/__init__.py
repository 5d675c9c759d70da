"""Error feedback: what was not sent in a step is added to later gradients."""
