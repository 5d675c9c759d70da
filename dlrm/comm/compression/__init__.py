"""Which values of a gradient are sent, and in how many bits."""
