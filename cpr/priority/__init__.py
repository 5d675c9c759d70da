"""Priority saving: trackers choose the most important rows, which are saved more often than the others.

Instead of all N rows of a table every T_save, a row save writes the r N most important ones every r T_save
(CPR, MLSys 2021; r is `PriorityConfig.ratio`): the same average bandwidth, and fresher important rows. A
`Tracker` defines importance; each FBGEMM module of this rank has one, which sees the ids that the module
looks up (`cpr.shards.lookups`). Small tables are saved whole each time, and so are tables with an ordinary
optimizer (data-parallel ones), which may change rows that were not looked up.

A tracker's state of a row covers the time since the row's last save. So where live rows equal the saved ones,
their state is exactly zero:

- a row that was loaded from the checkpoint (recovery, resuming) is forgotten. No tracker state is stored in a
  checkpoint;
- the state of rows that survive a failure must survive, too: `allocate` puts it into resident memory. If that
  is impossible (another sharding plan, lost memory), it is unknown which rows have changed:
  `Prioritizer.is_complete` is False, and the next save must be a full one.
"""

from cpr.priority.config import PriorityConfig
from cpr.priority.prioritizer import Prioritizer

__all__ = ["Prioritizer", "PriorityConfig"]
