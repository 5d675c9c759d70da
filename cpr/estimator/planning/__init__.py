"""Choice between full and partial recovery and of the save interval, from the formulas of the CPR paper."""
