"""Converts raw Criteo click logs to a prepared data set: `python -m data.prepare RAW... --out DIR`.

`data.text` reads whole lines of files, plain or compressed. A line passes these modules of `parse`:
`inputs` splits the files into days and pieces, `lines` holds the grammar, `columns` parses good lines into
typed columns and finds bad ones, and `ids` maps categories to table rows, whose number is in `tables`.
`convert` writes the piece as Parquet and commits it (`pieces`). `job` runs the passes over the input
(`passes`) on several processes, continues an interrupted job (both in `data.jobs`), checks the share of bad
lines (`rejects`), and finally writes the manifest. `vocabulary` is the additional first pass of `--ids
vocabulary`.
"""
