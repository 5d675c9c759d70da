"""Scores raw rows with an exported model: `python -m examples.score model.pt2 rows.csv --out FILE`."""

import argparse
import sys
import time

import numpy as np
import polars as pl

from data.jobs.command import run_command
from dlrm.scorer import Scorer


def main() -> int:
    """Run the command and return its exit code: 2 for a model, file, row or flag that does not fit."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("model", help="file of dlrm.export")
    parser.add_argument("rows", help="CSV, TSV, JSON lines or Parquet, with the columns of the schema")
    parser.add_argument("--out", help="Parquet file for all scores (default: print the first ones)")
    options = parser.parse_args()
    scorer, began = Scorer(options.model), time.perf_counter()
    scores = pl.DataFrame({"score": np.concatenate([*scorer.score_file(options.rows)])})
    seconds = time.perf_counter() - began
    print(scores.head())
    print(f"{len(scores):,} rows in {seconds:.2f} s: {len(scores) / seconds:,.0f} rows/s")
    if options.out:
        scores.write_parquet(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("examples.score", main))
