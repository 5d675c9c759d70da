"""Raw Criteo click logs in, a prepared data set out: `python -m data.prepare RAW... --out DIR`.

The walk of a line: `inputs` says which files there are and how they are cut into days and pieces,
`content` and `streams` read whole lines of one piece, `lines` is the grammar, `columns` turns good
lines into typed columns and finds the bad ones, `ids` (`lookup` for a vocabulary) maps categories to
rows of tables, whose number `tables` knows, `convert` writes the piece as Parquet and commits it
(`pieces`). `job` runs the passes over the input (`passes`) on several processes (`pool`, `worker`),
picks up a job that was killed (`state`), judges the bad lines (`rejects`), and writes the manifest when
everything is there. `vocabulary` is the extra first pass of `--ids vocabulary`; `verify` checks a
finished folder.
"""
