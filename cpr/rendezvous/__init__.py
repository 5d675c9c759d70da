"""How the workers of one generation find each other, whatever earlier generations left behind.

`join` gives each worker its rank and a store that nobody used before; `init_process_group` goes on from
there.
"""

from cpr.rendezvous.join import WorkerGroup, init_process_group, join
from cpr.rendezvous.rank_assignment import HeldSegment, WorkerInfo

__all__ = ["HeldSegment", "WorkerGroup", "WorkerInfo", "init_process_group", "join"]
