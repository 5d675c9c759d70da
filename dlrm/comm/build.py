"""Builds an exchange from its configuration; all ranks of a group build it together."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.autotune.candidates import Candidate
from dlrm.comm.autotune.tuner import ExchangeTuner
from dlrm.comm.collectives.collective import Buffers, Collective, select_share
from dlrm.comm.collectives.dense_sums import Ring, Tree
from dlrm.comm.collectives.levels import HiTopK, Nodes, TwoLevel, make_nodes
from dlrm.comm.collectives.sparse import ARTopK, SparseAllGather
from dlrm.comm.compression.compressors import Compressor, MSTopK, RandomK, Threshold, TopK
from dlrm.comm.compression.wire_codecs import Cast, WireCodec, WireInt8
from dlrm.comm.config import EXCHANGES, PLAIN, TRIED_CODECS, CommConfig
from dlrm.comm.controllers.controller import Controller, Fixed, SumOverRanks, num_kept_of
from dlrm.comm.controllers.gravac import GraVAC
from dlrm.comm.controllers.pareto import Pareto
from dlrm.comm.exchange import Exchange

CODECS: Final[dict[str, WireCodec]] = {
    "fp32": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "int8": WireInt8(),
}
IN_LEVELS: Final = ("two_level", "hi_topk")

logger = logging.getLogger(__name__)


def build_exchange(
    config: CommConfig, num_values: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Exchange:
    """Build an exchange of gradients of `num_values` values; all ranks of the group call it together.

    Raises:
        ValueError: the exchange is `priority` or `selsync`, which do not sum whole gradients and are built in
            `dlrm.dense_sync`.
    """
    if config.exchange in PLAIN and config.exchange != "dense":
        taken = ", ".join(name for name in EXCHANGES if name == "dense" or name not in PLAIN)
        raise ValueError(
            f"comm.exchange={config.exchange} does not sum whole gradients, as is needed here: choose one of "
            f"{taken}"
        )
    compressor = _compressor(config, dist.get_rank(group))
    make = Collectives(config.codec, compressor.is_exact, device, group)
    is_auto = config.exchange == "auto"
    is_tuned = is_auto and dist.get_world_size(group) > 1
    is_plain = is_auto or config.exchange == "dense"
    collective = make("ring", "fp32") if is_plain else make(config.exchange)
    if config.exchange in IN_LEVELS and dist.get_rank(group) == 0:
        _warn_of_one_node(config.exchange, make.nodes)
    tuner = None
    if is_tuned:
        tuner = ExchangeTuner(_candidates(config, make, compressor, num_values), device, group)
    return Exchange(
        num_values,
        collective,
        compressor,
        _controller(config, device, group),
        dense=make("ring"),
        device=device,
        group=group,
        tuner=tuner,
        # even a lossless ring may have to send the residuals of a resumed run; `dense` refuses them
        keeps_residual=config.error_feedback and config.exchange != "dense",
    )


class Collectives:
    """Makes collectives by their names in `CommConfig.exchange`; they share buffers.

    Args:
        codec: name of the encoding, unless a call names another.
        exact: whether all ranks select equally many values.
    """

    def __init__(
        self, codec: str, exact: bool, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._codec, self._device, self._group = codec, device, group
        self._nodes: Nodes | None = None
        buffers = Buffers()
        ring, tree = (partial(each, group=group, buffers=buffers) for each in (Ring, Tree))
        self._makers: dict[str, Callable[[WireCodec], Collective]] = {
            "ring": ring,
            "tree": tree,
            "two_level": lambda codec: TwoLevel(codec, self.nodes, buffers),
            "all_gather": partial(SparseAllGather, exact=exact, group=group, buffers=buffers),
            "star": lambda codec: ARTopK("star", ring(codec), exact=exact),
            "star_tree": lambda codec: ARTopK("star", tree(codec), exact=exact),
            "var": lambda codec: ARTopK("var", ring(codec), exact=exact),
            "var_tree": lambda codec: ARTopK("var", tree(codec), exact=exact),
            "hi_topk": lambda codec: HiTopK(codec, self.nodes, exact=exact, buffers=buffers),
        }

    def __call__(self, name: str, codec: str | None = None) -> Collective:
        """Make the collective of a name."""
        return self._makers[name](CODECS[codec or self._codec])

    @property
    def nodes(self) -> Nodes:
        """The nodes of the group; all ranks read it together the first time, which creates groups."""
        if self._nodes is None:
            self._nodes = make_nodes(self._device, self._group)
        return self._nodes


def _warn_of_one_node(exchange: str, nodes: Nodes) -> None:
    if nodes.num_nodes == 1 and nodes.per_node > 1:
        logger.warning(
            "comm.exchange=%s saves bytes between nodes, and these %d ranks count as one node: all values "
            "are sent in fp32. Nodes are those of torchrun's LOCAL_WORLD_SIZE, all of one size",
            exchange,
            nodes.per_node,
        )


def _candidates(
    config: CommConfig, make: Collectives, compressor: Compressor, num_values: int
) -> list[Candidate]:
    """Collectives that `auto` chooses from; two-level ones only on several nodes of several ranks."""
    dense, sparse = ["ring", "tree"], ["all_gather", "star", "star_tree"]
    if make.nodes.num_nodes > 1 and make.nodes.per_node > 1:
        dense.append("two_level")
        sparse.append("hi_topk")
    num_kept = num_kept_of(num_values, config.ratio)
    select = select_share(compressor, num_kept, num_values)
    collectives = [make(name) for name in (*dense, *sparse)]
    if config.wire_dtype == "auto":  # a tree wins for few values, where encoding gains nothing
        collectives += [make(name, codec) for name in dense if name != "tree" for codec in TRIED_CODECS]
    if not any(each.is_lossless for each in collectives):
        collectives.append(make("ring", "fp32"))
    return [
        Candidate(name=each.name, collective=each, select=select, num_kept=num_kept) for each in collectives
    ]


def _compressor(config: CommConfig, rank: int) -> Compressor:
    made: dict[str, Compressor] = {
        "mstopk": MSTopK(),
        "topk": TopK(),
        "threshold": Threshold(config.threshold),
        # ranks draw different values, so that together they send more of the gradient
        "random": RandomK(rank),
    }
    return made[config.compressor]


def _controller(config: CommConfig, device: torch.device, group: dist.ProcessGroup | None) -> Controller:
    if config.controller == "fixed":
        return Fixed(config.ratio)
    agree = SumOverRanks(device, group)
    if config.controller == "pareto":
        return Pareto(agree=agree)
    return GraVAC(
        agree=agree,
        policy="exponential" if config.controller == "gravac" else "geometric",
        min_gain=config.min_gain,
        window_steps=config.window_steps,
    )
