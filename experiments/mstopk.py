"""MSTopK of this project against `torch.topk`: `python -m experiments.mstopk [--quick]`.

MSTopK finds the largest magnitudes of a gradient approximately, by multiple sampling (Shi et al., MLSys
2021). Both select 1 % and 0.1 % of the values of vectors that are normally distributed, Cauchy distributed (a
heavy tail), or nearly all 0 (with fewer other values than are selected). `torch.topk` (unsorted) gets the
magnitudes, MSTopK computes them itself. Both take turns, each as often first as second, with one thread
(`torch.topk` of one vector uses no more) and freed memory kept in the process, as in the trainer. Figures,
each the worst over distributions and shares:

- `mstopk_speedup_1m`, `mstopk_speedup_10m`, `mstopk_speedup_100m`: time of `torch.topk` over that of MSTopK
  for vectors of so many values, median over rounds; `..._low` and `..._high`: the extremes over those rounds.
- `mstopk_energy`: sum of squares of the values that MSTopK selected over that of `torch.topk`, over all
  vectors. Both select equally many values, each once; the command checks it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dlrm.comm.compression.compressors import MSTopK
from dlrm.launch.malloc import keep_freed_memory
from experiments.harness.command import experiment_parser
from experiments.harness.record import Record, Row
from experiments.harness.statistics import median_figures

SEED: Final = 1
SHARES: Final = (0.01, 0.001)
WANTED: Final = 3.0
"""Goal for the speed-up, from 10 million values on."""
NOT_ZERO_EVERY: Final = 2500
"""Every how many values of the vector that is nearly all 0 another value stands."""


SIZES: Final = {"1m": (1_000_000, 21), "10m": (10_000_000, 11), "100m": (100_000_000, 5)}
"""Number of values of a vector and of rounds, by the ending of the figures."""
QUICK_SIZES: Final = {label: (max(num_values // 100, 100_000), 2) for label, (num_values, _) in SIZES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    quick = experiment_parser(__doc__).parse_args(arguments).quick
    sizes = QUICK_SIZES if quick else SIZES
    keep_freed_memory()
    config = {
        "num_values": [num_values for num_values, _ in sizes.values()],
        "rounds": [rounds for _, rounds in sizes.values()],
        "shares": SHARES,
        "kinds": list(KINDS),
        "threads": 1,
    }
    record = Record("mstopk", config, seeds=[SEED], quick=quick)
    for size, kind, share in product(sizes, KINDS, SHARES):
        key = f"{size} {kind} {share:.1%}"
        row = record.measure(key, partial(_measure, size, *sizes[size], kind, share))
        print(f"{key}: {_speed_up(row):.2f} x, energy {row['energy']:.4f}", flush=True)
    return record.publish(figures_of(record.rows), draw)


def _normal(size: int, seed: int = SEED) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _cauchy(size: int) -> Tensor:
    return _normal(size).div_(_normal(size, SEED + 1))


def _nearly_zero(size: int) -> Tensor:
    vector = _normal(size)
    return torch.where(torch.arange(size) % NOT_ZERO_EVERY == 0, vector, 0.0)


KINDS: Final[dict[str, Callable[[int], Tensor]]] = {
    "normal": _normal,
    "Cauchy": _cauchy,
    "nearly all 0": _nearly_zero,
}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def _measure(size: str, num_values: int, rounds: int, kind: str, share: float) -> Row:
    """Time `topk` and `MSTopK` in turns; also return the energy that MSTopK keeps, relative to `topk`."""
    vector = KINDS[kind](num_values)
    magnitudes = vector.abs()
    num_kept = int(share * num_values)
    contenders: dict[str, Callable[[], Tensor]] = {
        "topk_s": lambda: magnitudes.topk(num_kept, sorted=False).indices,
        "mstopk_s": lambda: MSTopK().select(vector, num_kept),
    }
    exact, found = (find() for find in contenders.values())  # also touches the memory before the clock starts
    assert found.numel() == len(torch.unique(found)) == num_kept
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            start_s = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - start_s)
    energy = float(_energy(vector, found) / _energy(vector, exact))
    return {"size": size, "kind": kind, "share": share, **times, "energy": energy}


def _energy(vector: Tensor, indices: Tensor) -> Tensor:
    return vector[indices].double().square().sum()


def _speed_ups(row: Row) -> list[float]:
    """Speed-up in every round."""
    return [theirs / ours for theirs, ours in zip(row["topk_s"], row["mstopk_s"], strict=True)]


def _speed_up(row: Row) -> float:
    return median(_speed_ups(row))


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for label in dict.fromkeys(row["size"] for row in rows):
        worst = min((row for row in rows if row["size"] == label), key=_speed_up)
        figures |= median_figures(f"mstopk_speedup_{label}", _speed_ups(worst))
    return figures | {"mstopk_energy": min(row["energy"] for row in rows)}


def draw(result: Row, folder: Path) -> None:
    """Draw the speed-up for every distribution and share by size, with the extremes over rounds."""
    rows = result["rows"]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(row["size"] for row in rows))
    lines = list(dict.fromkeys((row["kind"], row["share"]) for row in rows))
    for number, (kind, share) in enumerate(lines):
        mine = [row for row in rows if (row["kind"], row["share"]) == (kind, share)]
        middles = [_speed_up(row) for row in mine]
        edges = [
            [middle - min(_speed_ups(row)) for row, middle in zip(mine, middles, strict=True)],
            [max(_speed_ups(row)) - middle for row, middle in zip(mine, middles, strict=True)],
        ]
        places = [labels.index(row["size"]) + (number - (len(lines) - 1) / 2) * 0.13 for row in mine]
        axes.errorbar(places, middles, yerr=edges, fmt="o", capsize=3, label=f"{kind}, {share:.1%} selected")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.axhline(
        WANTED, color="tab:red", linewidth=0.8, linestyle="--", label="goal, from 10 million values on"
    )
    axes.set_xticks(range(len(labels)), [f"{label.removesuffix('m')} million values" for label in labels])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("time of torch.topk / time of MSTopK")
    axes.set_title(
        "Selecting the largest magnitudes: speed-up over torch.topk (bars: extremes over rounds)", fontsize=10
    )
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(folder / "mstopk.png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
