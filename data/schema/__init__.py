"""Schemas: how the columns of any table become the columns of a data set.

`definition` is what a schema file says, `values` and `rows` read raw columns, `ids` turns values into ids of
table rows, and `encoder` is all of it: `data.convert` makes data sets with it, and who scores raw rows uses
the same one, `Encoder.of_dataset(FOLDER)`.
"""

from data.schema.definition import Dense, Label, Schema, Sparse, Split, Time
from data.schema.encoder import Encoder

__all__ = ["Dense", "Encoder", "Label", "Schema", "Sparse", "Split", "Time"]
