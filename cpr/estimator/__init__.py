"""What to save how often, and whether partial recovery pays: formulas, measurements, and the decision."""
