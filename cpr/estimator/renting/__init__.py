"""How many workers to rent, and with which batch: time and money to a target, from short runs."""
