"""How much of a gradient is sent, and when: decided anew as training goes on, alike on all ranks.

`Fixed` keeps one share. `GraVAC` and `Pareto` find one by trying. `SelSync` leaves out whole exchanges.
"""

from dlrm.comm.controllers.agreement import Agree, SumOverRanks
from dlrm.comm.controllers.choice import Choice, Controller
from dlrm.comm.controllers.fixed import Fixed
from dlrm.comm.controllers.gravac import GraVAC
from dlrm.comm.controllers.pareto import Pareto
from dlrm.comm.controllers.selsync import SelSync, averaged_state

__all__ = [
    "Agree",
    "Choice",
    "Controller",
    "Fixed",
    "GraVAC",
    "Pareto",
    "SelSync",
    "SumOverRanks",
    "averaged_state",
]
