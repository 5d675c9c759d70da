"""How the workers of one generation find each other, whatever earlier generations left behind.

`meet` gives each worker its rank and a store that nobody used before; `init_process_group` goes on from
there.
"""

from cpr.rendezvous.meet import Meeting, init_process_group, meet
from cpr.rendezvous.rank_assignment import HeldSegment, Offer

__all__ = ["HeldSegment", "Meeting", "Offer", "init_process_group", "meet"]
