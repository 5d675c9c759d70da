"""Controllers decide how much of a gradient is sent, and when, during training and alike on all ranks.

`Fixed` keeps one share. `GraVAC` and `Pareto` find one by trying. `SelSync` skips whole exchanges.
"""

from dlrm.comm.controllers.controller import Controller, Fixed, SumOverRanks, ValueSelection, num_kept_of
from dlrm.comm.controllers.gravac import GraVAC
from dlrm.comm.controllers.pareto import Pareto
from dlrm.comm.controllers.selsync import SelSync, averaged_state

__all__ = [
    "Controller",
    "Fixed",
    "GraVAC",
    "Pareto",
    "SelSync",
    "SumOverRanks",
    "ValueSelection",
    "averaged_state",
    "num_kept_of",
]
