"""Who competes in `experiments.communication`: ways to sum dense gradients, ours and PyTorch's, by name."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from dlrm.comm.config import DENSE, SPARSE, CommConfig, SparseExchange


class Rival(StrEnum):
    """What comes with PyTorch, and what sends nothing."""

    NOTHING = "no exchange: ranks drift apart"
    DDP = "DistributedDataParallel, dense fp32, beside the backward pass"
    DDP_FP16 = "DDP with PyTorch's fp16_compress_hook"
    POWER_SGD = "DDP with PyTorch's PowerSGD hook"


POWER_SGD_RANK: Final = 2
RATIOS: Final = (0.1, 0.01, 0.001)

Contender = CommConfig | Rival
AUTO_NAME: Final = "auto"
AUTO: Final = CommConfig(exchange="auto")


def _sparse(exchange: SparseExchange, ratios: tuple[float, ...] = RATIOS) -> dict[str, Contender]:
    return {f"{exchange}_{ratio:g}": CommConfig(exchange=exchange, ratio=ratio) for ratio in ratios}


CONTENDERS: Final[Mapping[str, Contender]] = {
    "nothing": Rival.NOTHING,
    "ddp": Rival.DDP,
    "ddp_fp16": Rival.DDP_FP16,
    "power_sgd": Rival.POWER_SGD,
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
"""By their names in rows and figures."""

BASELINE: Final = "ddp"
LIMIT: Final = "nothing"
"""No exchange is faster than none."""

LEVELS: Final = ("two_level", "two_level_bf16", "two_level_int8", *_sparse("hi_topk"))
"""For nodes of more than one worker."""
STEPPED: Final = (
    *("nothing", "ddp", "ddp_fp16", "power_sgd", "dense", "tree", "priority"),
    *("ring_bf16", "ring_fp16", "ring_int8"),
    *("all_gather_0.1", "all_gather_0.01", "all_gather_0.001"),
    *("star_0.1", "star_0.01", "star_0.001", "star_tree_0.01", "var_0.01"),
)
"""Those whose steps are all alike, so that a few of them tell all; controllers need a whole training."""
STEPPED_LARGE: Final = (
    *("nothing", "ddp", "ddp_fp16", "power_sgd", "dense", "ring_bf16", "ring_int8"),
    *("all_gather_0.01", "all_gather_0.001", "star_0.01", "star_0.001", "star_tree_0.01"),
)
"""Of a large model on few workers: without what can only be slower there, all fp32 values in other ways than
by a ring, and a tenth of them."""
STEPPED_LARGEST: Final = ("nothing", "ddp", "ddp_fp16", "dense", "all_gather_0.01")
"""Of a large model on many workers, with one of these two:"""
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
"""What `auto` may choose, by the name of the collective, and who does the same without choosing."""
TRAINED: Final = (
    *("ddp", "auto", "ddp_fp16", "power_sgd", "ring_int8", "all_gather_0.01", "star_0.01"),
    *("gravac", "gravac_geometric", "pareto", "selsync"),
)
"""Those that train a model to the end."""


def stepped(*, is_large: bool, num_workers: int, per_node: int) -> tuple[str, ...]:
    """Who takes turns in a cell.

    Args:
        is_large: whether the model fills memory.
        num_workers: of the cell.
        per_node: workers of a node.
    """
    if not is_large:
        return STEPPED + (LEVELS if per_node > 1 else ())
    if num_workers <= 2:
        return STEPPED_LARGE
    return STEPPED_LARGEST + (LARGEST_LEVELS if per_node > 1 else LARGEST_FLAT)


def is_lossless(name: str) -> bool:
    """Whether a contender sends all values as they are, in fp32."""
    contender = CONTENDERS[name]
    if isinstance(contender, Rival):
        return contender is Rival.DDP
    return contender.exchange in DENSE and contender.codec == "fp32"


def is_comparable(name: str) -> bool:
    """Whether a contender leaves no more of a gradient behind than `auto` may.

    `auto` sends all values, in whatever encoding, or a share of `CommConfig.ratio`; it does not decide for
    its user that a tenth of that will do, nor that a low rank or a rare meeting will: what those cost is a
    matter of the model, and of the trainings.
    """
    contender = CONTENDERS[name]
    if isinstance(contender, Rival):
        return contender in {Rival.DDP, Rival.DDP_FP16}
    if contender.exchange in DENSE:
        return True
    return contender.exchange in SPARSE and contender.controller == "fixed" and contender.ratio >= AUTO.ratio
