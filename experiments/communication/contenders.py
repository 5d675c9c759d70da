"""The contenders of `experiments.communication`: ways to sum dense gradients, by name."""

from collections.abc import Mapping
from enum import StrEnum
from statistics import median
from typing import Final

from dlrm.comm.config import DENSE, SPARSE, CommConfig, SparseExchange
from experiments.harness.statistics import Ratio
from experiments.harness.turns import Rounds, ratios


class Baseline(StrEnum):
    """Contenders of PyTorch, and the one without an exchange."""

    NOTHING = "no exchange: ranks diverge"
    DDP = "DistributedDataParallel, dense fp32, overlapping the backward pass"
    DDP_FP16 = "DDP with PyTorch's fp16_compress_hook"
    POWER_SGD = "DDP with PyTorch's PowerSGD hook"


POWER_SGD_RANK: Final = 2
RATIOS: Final = (0.1, 0.01, 0.001)

Contender = CommConfig | Baseline
AUTO_NAME: Final = "auto"
AUTO: Final = CommConfig(exchange="auto")


def _sparse(exchange: SparseExchange, ratios: tuple[float, ...] = RATIOS) -> dict[str, Contender]:
    return {f"{exchange}_{ratio:g}": CommConfig(exchange=exchange, ratio=ratio) for ratio in ratios}


CONTENDERS: Final[Mapping[str, Contender]] = {
    "nothing": Baseline.NOTHING,
    "ddp": Baseline.DDP,
    "ddp_fp16": Baseline.DDP_FP16,
    "power_sgd": Baseline.POWER_SGD,
    "dense": CommConfig(),
    "tree": CommConfig(exchange="tree"),
    "two_level": CommConfig(exchange="two_level"),
    "priority": CommConfig(exchange="priority"),
    "two_level_bf16": CommConfig(exchange="two_level", wire_dtype="bf16"),
    "two_level_int8": CommConfig(exchange="two_level", wire_dtype="int8"),
    "ring_bf16": CommConfig(exchange="ring", wire_dtype="bf16"),
    "ring_fp16": CommConfig(exchange="ring", wire_dtype="fp16"),
    "ring_int8": CommConfig(exchange="ring", wire_dtype="int8"),
    **_sparse("all_gather"),
    **_sparse("star"),
    **_sparse("star_tree", (0.01,)),
    **_sparse("var", (0.01,)),
    **_sparse("hi_topk"),
    "gravac": CommConfig(exchange="all_gather", controller="gravac", window_steps=20),
    "gravac_geometric": CommConfig(exchange="all_gather", controller="gravac_geometric", window_steps=20),
    "pareto": CommConfig(exchange="all_gather", controller="pareto"),
    "selsync": CommConfig(exchange="selsync"),
    AUTO_NAME: AUTO,
}
"""Contenders by their names in rows and figures."""

BASELINE: Final = "ddp"
LIMIT: Final = "nothing"
"""The contender without an exchange, which bounds the throughput of all others."""

LEVELS: Final = ("two_level", "two_level_bf16", "two_level_int8", *_sparse("hi_topk"))
"""Contenders for nodes of more than one worker."""
STEPPED: Final = (
    *("nothing", "ddp", "ddp_fp16", "power_sgd", "dense", "tree", "priority"),
    *("ring_bf16", "ring_fp16", "ring_int8"),
    *("all_gather_0.1", "all_gather_0.01", "all_gather_0.001"),
    *("star_0.1", "star_0.01", "star_0.001", "star_tree_0.01", "var_0.01"),
)
"""Contenders of which a few steps are representative; controllers need a whole training."""
STEPPED_LARGE: Final = (
    *("nothing", "ddp", "ddp_fp16", "power_sgd", "dense", "ring_bf16", "ring_int8"),
    *("all_gather_0.01", "all_gather_0.001", "star_0.01", "star_0.001", "star_tree_0.01"),
)
"""Contenders for a large model on few workers: without those that can only be slower there, that is, other
collectives than a ring for all fp32 values, and a share of a tenth."""
STEPPED_LARGEST: Final = ("nothing", "ddp", "ddp_fp16", "dense", "all_gather_0.01")
"""Contenders for a large model on many workers, together with those of one of the next two:"""
LARGEST_FLAT: Final = ("star_0.01",)
LARGEST_LEVELS: Final = ("two_level", "hi_topk_0.01")
CHOSEN: Final[Mapping[str, str]] = {
    "ring fp32": "dense",
    "tree fp32": "tree",
    "two levels fp32": "two_level",
    "ring bf16": "ring_bf16",
    "ring int8": "ring_int8",
    "two levels bf16": "two_level_bf16",
    "two levels int8": "two_level_int8",
    "sparse all-gather fp32": "all_gather_0.01",
    "AR-Topk STAR, ring fp32": "star_0.01",
    "AR-Topk STAR, tree fp32": "star_tree_0.01",
    "HiTopK fp32": "hi_topk_0.01",
}
"""The contender with the same exchange, by name of a collective that `auto` may choose."""
TRAINED: Final = (
    *("ddp", "auto", "ddp_fp16", "power_sgd", "ring_int8", "all_gather_0.01", "star_0.01"),
    *("gravac", "gravac_geometric", "pareto", "selsync"),
)
"""Contenders that train a model to the end."""

STAYS_WITHIN: Final = 1.03
"""Multiple of the fastest time above which a contender leaves the cell."""
FIRST_STAYS_WITHIN: Final = 1.5
"""The same after fewer than `SURE_ROUNDS` rounds, which say little about chance."""
SURE_ROUNDS: Final = 3
SHARED_ROUNDS: Final = 12
"""Rounds after which only comparable contenders continue, whose ratios need the best precision."""


def stepped(*, is_large: bool, num_workers: int, per_node: int) -> tuple[str, ...]:
    """Contenders of a cell; a large model fills memory."""
    if not is_large:
        return STEPPED + (LEVELS if per_node > 1 else ())
    if num_workers <= 2:
        return STEPPED_LARGE
    return STEPPED_LARGEST + (LARGEST_LEVELS if per_node > 1 else LARGEST_FLAT)


def is_lossless(name: str) -> bool:
    """Whether a contender sends all values in fp32."""
    contender = CONTENDERS[name]
    if isinstance(contender, Baseline):
        return contender is Baseline.DDP
    return contender.exchange in DENSE and contender.codec == "fp32"


def is_comparable(name: str) -> bool:
    """Whether a contender sends at least as large a share of a gradient as `auto` must.

    `auto` sends all values, in any encoding, or a share of `CommConfig.ratio`. It never chooses a smaller
    share, a low rank or a rarer exchange for its user, because their cost in quality depends on the model.
    """
    contender = CONTENDERS[name]
    if isinstance(contender, Baseline):
        return contender in {Baseline.DDP, Baseline.DDP_FP16}
    if contender.exchange in DENSE:
        return True
    return contender.exchange in SPARSE and contender.controller == "fixed" and contender.ratio >= AUTO.ratio


def still_in(rounds: Rounds, chosen: str) -> list[str]:
    """Contenders of the next round.

    These are the choice of `auto` and the comparable contenders that may be about as fast as the best of
    them. In the first rounds also the baseline, the limit, and others that may be about as fast as the best
    of all.
    """
    within = STAYS_WITHIN if len(rounds) >= SURE_ROUNDS else FIRST_STAYS_WITHIN
    typical = {name: median(each[name] for each in rounds) for name in rounds[-1] if name != LIMIT}
    best = min(typical, key=typical.__getitem__)
    best_comparable = min(filter(is_comparable, typical), key=typical.__getitem__)

    def is_close(name: str) -> bool:
        other = best_comparable if is_comparable(name) else best
        return Ratio.of(ratios(rounds, name, other)).high >= 1 / within

    close = {chosen, *filter(is_close, typical)}
    if len(rounds) >= SHARED_ROUNDS:
        return sorted(filter(is_comparable, close))
    return sorted(close | {BASELINE, LIMIT} & rounds[-1].keys())
