"""Makes a data set from tables with any columns: `python -m data.convert SCHEMA.toml FILES... --out DIR`.

`read` gives the rows of the files in blocks. `runs` reads them as the schema says (`data.schema`), keeps bad
rows apart (`rejects`), and stores the others in sorted runs, with value counts (`counts`) and sums
(`moments`). `order` finds days and row groups in the runs, and `write` merges, encodes and writes them. `job`
does all that on worker processes (`data.jobs`) and writes the manifest last. `guess` writes a schema to start
from.
"""
