"""Makes a data set of Parquet files that are fit already: reads and checks them, and writes the manifest.

`schema` says which columns are what, `files` finds the files and their days, and `job` reads them all.
"""

from data.index.job import index
from data.index.schema import IndexSchema

__all__ = ["IndexSchema", "index"]
