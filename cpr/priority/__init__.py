"""Which rows deserve saving: one small class for each scheme, and what a save asks.

Instead of all N rows of a table every T_save, a row save writes the r N most important ones every r T_save
(CPR, MLSys 2021; here r is `PriorityConfig.ratio`): the same average bandwidth, and fresher important rows.
What "important" means is a `Tracker`'s business; there is one for each FBGEMM module of this rank, fed with
the ids that the module really looks up (`cpr.shards.lookups`). Tables that are not among the largest are
saved whole each time, and so are those that an ordinary optimizer updates (data-parallel ones): with momentum
or weight decay, it moves rows that nobody looked up.

Whatever a tracker keeps of a row is about the time since the row was last saved. So where live rows equal
what is saved, the state that belongs to them is zero, exactly:

- after a row was loaded from the checkpoint (partial or full recovery, resuming), it is forgotten. No counter
  is stored in a checkpoint, for none is needed;
- the counters of rows that survive a failure must survive with them: `allocate` puts them into memory that
  does. Where that is not possible (another sharding plan, lost memory), nobody knows which rows have changed,
  `Prioritizer.is_complete` is False, and the next save must be a full one.
"""

from cpr.priority.config import PriorityConfig
from cpr.priority.prioritizer import Prioritizer

__all__ = ["Prioritizer", "PriorityConfig"]
