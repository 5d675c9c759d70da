"""Dynamic tables: ids from all 64-bit integers, in a table with as many rows as fit.

A dynamic table is an ordinary FBGEMM table. Which id has which row is a column of the rows themselves,
beside weights and optimizer state, so that checkpoints, priority, partial recovery and resident memory carry
it along and need not know (`cpr.shards.add_row_columns`). Ids are translated into rows where the table is,
after TorchRec's exchange of inputs (`translation`). An id gets a row when it was seen often enough, and that
of the id which was not seen for longest if none is free (`table`).

What is open is the space of ids: any int64, none is reserved. The number of rows is fixed in a run, and a
table is whole on one rank.

Source: DES, arXiv 1909.04823, and its sibling, TensorFlow's RFC "Sparse Domain Isolation".
"""

from dlrm.sharding.dynamic.table import DynamicTable
from dlrm.sharding.dynamic.translation import make_dynamic

__all__ = ["DynamicTable", "make_dynamic"]
