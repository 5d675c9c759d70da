"""Error feedback: values of a gradient that were not sent in a step are added to later gradients."""
