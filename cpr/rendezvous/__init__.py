"""Rendezvous of the workers of one generation, independent of what earlier generations left behind.

`join` gives each worker its rank and a fresh store, from which `init_process_group` makes the process group.
"""

from cpr.rendezvous.join import WorkerGroup, init_process_group, join
from cpr.rendezvous.rank_assignment import HeldSegment, WorkerInfo

__all__ = ["HeldSegment", "WorkerGroup", "WorkerInfo", "init_process_group", "join"]
