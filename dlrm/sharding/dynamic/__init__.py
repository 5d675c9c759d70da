"""Dynamic tables: tables for arbitrary 64-bit ids, in which rows are assigned to ids as they appear.

A dynamic table is an ordinary FBGEMM table with a fixed number of rows, whole on one rank. The id of each row
is stored as a column next to weights and optimizer state (`cpr.shards.add_row_columns`), so that checkpoints,
priority, partial recovery and resident memory handle it without special code. Ids are translated into rows on
the rank that has the table, after TorchRec's exchange of inputs (`translation`). An id gets a row when it was
seen often enough; if none is free, the least recently seen id loses its row (`table`).

Source: DES, arXiv 1909.04823, and its sibling, TensorFlow's RFC "Sparse Domain Isolation".
"""

from dlrm.sharding.dynamic.table import DynamicTable
from dlrm.sharding.dynamic.translation import make_dynamic

__all__ = ["DynamicTable", "make_dynamic"]
