"""When failures come: logs of failures, and the distributions that fit them."""
