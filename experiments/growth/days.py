"""How long the data loader takes to its first batch, by days of data."""

import shutil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from data.loader import DataLoader, LoaderConfig
from data.synthetic import SyntheticConfig, generate
from experiments.harness.record import Row

ROWS_PER_DAY: Final = 20_000
BATCH_SIZE: Final = 512
REPEATS: Final = 5


def measure_days(days: int, scratch: Path) -> Row:
    """Median seconds from opening a data set of `days` to its first batch, and to one half way through.

    The second is what a restarted worker waits for.
    """
    try:
        generate(SyntheticConfig(days=days, rows_per_day=ROWS_PER_DAY), scratch)
        uri, config = str(scratch), LoaderConfig(batch_size=BATCH_SIZE)
        first, middle = DataLoader(uri, config), DataLoader(uri, config)
        batches = iter(middle)
        for _ in range(len(middle) // 2):
            next(batches)
        states = {"first_batch_s": first.state_dict(), "next_batch_s": middle.state_dict()}
        first.close()
        middle.close()
        took_s: dict[str, list[float]] = {name: [] for name in states}
        for _ in range(1 + REPEATS):
            for name, state in states.items():
                began = perf_counter()
                loader = DataLoader(uri, config)
                loader.load_state_dict(state)
                next(iter(loader))
                took_s[name].append(perf_counter() - began)
                loader.close()
        ours = {name: median(each[1:]) for name, each in took_s.items()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {"axis": "days", "value": days, "ours": ours}
