"""Raw Criteo click logs in, a prepared data set out: `python -m data.prepare RAW... --out DIR`.

The walk of a line: `inputs` says which files there are and how they are cut into days and pieces,
`streams` reads whole lines of one piece, `lines` is the grammar and finds the bad ones, `columns`
turns good lines into typed columns, `ids` maps categories to table rows, `convert` writes the piece
as Parquet and commits it. `job` runs the pieces on several processes (`pool`), picks up a job that
was killed, and writes the manifest when everything is there. `vocabulary` is the extra first pass
of `--ids vocabulary`; `verify` checks a finished folder.
"""
