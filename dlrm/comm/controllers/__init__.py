"""Controllers decide how much of a gradient is sent, and when, during training and alike on all ranks.

`Fixed` keeps one share. `GraVAC` and `Pareto` find one by trying. `SelSync` skips whole exchanges.
"""
