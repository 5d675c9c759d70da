"""Full or partial recovery, and how often to save: the formulas and the recommendation."""
