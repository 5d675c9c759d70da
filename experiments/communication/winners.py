"""Compares the fastest collective by the planner's formulas with a paper's measurements.

Table VI of Tyagi & Swany (arXiv 2312.02493) lists the times of three ways to sum top-k values for four
models, three bandwidths and three shares kept. The bytes of each model are inferred from its first time, so
that the formulas have not seen the other 35 times.
"""

from typing import Final

from dlrm.comm import cost

NUM_RANKS: Final = 8
ALPHA_S: Final = 1e-3
GBIT_PER_S: Final = (10, 5, 1)
KEPT: Final = (0.1, 0.01, 0.001)
WAYS: Final[tuple[cost.Winner, ...]] = ("all-gather", "ring", "tree")

MEASURED_MS: Final = {
    "ResNet18": (
        ((54.0, 35.0, 43.2), (7.66, 18.1, 12.2), (3.28, 16.7, 9.0)),
        ((107.76, 52.5, 76.3), (13.83, 20.8, 16.1), (4.25, 17.9, 10.1)),
        ((526.3, 194.7, 345.6), (51.93, 34.1, 41.9), (8.86, 19.5, 12.8)),
    ),
    "ResNet50": (
        ((115.1, 52.9, 83.4), (14.35, 20.3, 15.9), (4.65, 18.1, 10.0)),
        ((232.0, 94.7, 156.2), (28.1, 26.1, 24.2), (5.3, 17.8, 10.5)),
        ((1148.0, 405.5, 745.0), (126.5, 58.8, 83.7), (14.35, 21.0, 16.1)),
    ),
    "AlexNet": (
        ((271.8, 106.8, 180.4), (32.73, 25.2, 25.8), (6.0, 18.6, 11.1)),
        ((544.5, 200.4, 354.8), (61.75, 34.8, 42.6), (8.92, 19.3, 13.1)),
        ((2718.7, 964.4, 1778.0), (282.7, 111.8, 186.8), (31.33, 27.0, 27.3)),
    ),
    "ViT": (
        ((592.77, 238.6, 401.2), (68.48, 36.2, 46.2), (9.15, 19.2, 12.9)),
        ((1206.0, 424.3, 779.1), (127.45, 58.0, 86.2), (15.3, 21.4, 16.9)),
        ((5973.0, 2047.0, 3852.0), (601.8, 222.8, 385.2), (59.68, 36.7, 44.4)),
    ),
}
"""Milliseconds of `WAYS` by model, bandwidth and share kept."""


def table_vi_hits() -> int:
    """Count in how many of the 36 measured cells the formulas name the fastest collective."""
    hits = 0
    for of_bandwidths in MEASURED_MS.values():
        num_bytes = _num_bytes(of_bandwidths[0][0][0])
        for gbit_per_s, of_shares in zip(GBIT_PER_S, of_bandwidths, strict=True):
            for kept, times in zip(KEPT, of_shares, strict=True):
                predicted = cost.winner(ALPHA_S, _beta_s(gbit_per_s), NUM_RANKS, num_bytes, kept)
                hits += predicted == min(zip(times, WAYS, strict=True))[1]
    return hits


def _num_bytes(first_ms: float) -> float:
    """Bytes of a model, from the time of its all-gather at the first bandwidth and share kept."""
    beta_s = _beta_s(GBIT_PER_S[0])
    latency_s = cost.sparse_sums_s(ALPHA_S, beta_s, NUM_RANKS, 0.0, KEPT[0])["all-gather"]
    of_a_byte_s = cost.sparse_sums_s(0.0, beta_s, NUM_RANKS, 1.0, KEPT[0])["all-gather"]
    return (first_ms / 1e3 - latency_s) / of_a_byte_s


def _beta_s(gbit_per_s: float) -> float:
    return 8 / (gbit_per_s * 1e9)
