"""From a configuration to an exchange. All ranks of a group build it together."""

import logging
from collections.abc import Callable
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.autotune.candidates import Candidate
from dlrm.comm.autotune.tuner import ExchangeTuner
from dlrm.comm.collectives import (
    ARTopK,
    Buffers,
    Collective,
    HiTopK,
    Ring,
    SparseAllGather,
    Tree,
    TwoLevel,
    keeping,
)
from dlrm.comm.collectives.process_groups import Nodes, make_nodes
from dlrm.comm.compression.codecs import Half, Plain, WireCodec, WireInt8
from dlrm.comm.compression.compressors import Compressor, MSTopK, RandomK, Threshold, TopK
from dlrm.comm.config import EXCHANGES, PLAIN, TRIED_CODECS, CommConfig
from dlrm.comm.controllers import Controller, Fixed, GraVAC, Pareto, SumOverRanks
from dlrm.comm.controllers.choice import num_kept_of
from dlrm.comm.exchange import Exchange
from dlrm.comm.feedback.error_feedback import ErrorFeedback, NoMemory

CODECS: Final[dict[str, WireCodec]] = {
    "fp32": Plain(),
    "bf16": Half(torch.bfloat16),
    "fp16": Half(torch.float16),
    "int8": WireInt8(),
}
IN_LEVELS: Final = ("two_level", "hi_topk")

logger = logging.getLogger(__name__)


def build_exchange(
    config: CommConfig, num_values: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> Exchange:
    """The exchange that a configuration asks for; all ranks of the group call it together.

    Args:
        config: `dense` is a `ring` in fp32. Of `priority` and `selsync`, see `dlrm.comm.p3.scheduler` and
            `dlrm.comm.controllers.selsync`: they are no sums of a whole gradient.
        num_values: of the gradient.
        device: of the gradient.
        group: of the ranks; None: all.

    Raises:
        ValueError: the configuration is of one of those two.
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
    plans = is_auto and dist.get_world_size(group) > 1
    collective = make.plain_ring() if is_auto or config.exchange == "dense" else make(config.exchange)
    if config.exchange in IN_LEVELS and dist.get_rank(group) == 0:
        _warn_of_one_node(config.exchange, make.nodes)
    # others may have to send what was owed by a run that goes on under them
    num_owed = 0 if config.exchange == "dense" else num_values
    keeps = config.error_feedback and num_owed
    planner = None
    if plans:
        planner = ExchangeTuner(_candidates(config, make, compressor, num_values), device, group)
    return Exchange(
        num_values,
        collective,
        compressor,
        ErrorFeedback(num_owed, device) if keeps else NoMemory(num_owed, device),
        _controller(config, device, group),
        dense=make("ring"),
        device=device,
        group=group,
        planner=planner,
    )


class Collectives:
    """Makes collectives by their names; they share buffers, as one is at work at a time.

    Args:
        codec: of `dlrm.comm.config.CODECS`: how values travel, unless another one is asked for.
        exact: all ranks select equally many.
        device: of the gradient.
        group: of the ranks; None: all.
    """

    def __init__(
        self, codec: str, exact: bool, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self._codec = codec
        self._exact, self._device, self._group = exact, device, group
        self._buffers = Buffers()
        self._nodes: Nodes | None = None
        self._makers: dict[str, Callable[[WireCodec], Collective]] = {
            "ring": self._ring,
            "tree": self._tree,
            "two_level": lambda codec: TwoLevel(codec, self.nodes, self._buffers),
            "all_gather": lambda codec: SparseAllGather(
                codec, exact=exact, group=group, buffers=self._buffers
            ),
            "star": lambda codec: ARTopK("star", self._ring(codec), exact=exact),
            "star_tree": lambda codec: ARTopK("star", self._tree(codec), exact=exact),
            "var": lambda codec: ARTopK("var", self._ring(codec), exact=exact),
            "var_tree": lambda codec: ARTopK("var", self._tree(codec), exact=exact),
            "hi_topk": lambda codec: HiTopK(codec, self.nodes, exact=exact, buffers=self._buffers),
        }

    def __call__(self, name: str, codec: str | None = None) -> Collective:
        """The collective of that name in `CommConfig.exchange`."""
        return self._makers[name](CODECS[codec or self._codec])

    def plain_ring(self) -> Ring:
        """The backend's all-reduce."""
        return self._ring(CODECS["fp32"])

    @property
    def nodes(self) -> Nodes:
        """Where ranks are; asked for by all of them together, the first time."""
        if self._nodes is None:
            self._nodes = make_nodes(self._device, self._group)
        return self._nodes

    def _ring(self, codec: WireCodec) -> Ring:
        return Ring(codec, self._group, self._buffers)

    def _tree(self, codec: WireCodec) -> Tree:
        return Tree(codec, self._group, self._buffers)


def _warn_of_one_node(exchange: str, nodes: Nodes) -> None:
    if nodes.num_nodes == 1 and nodes.per_node > 1:
        logger.warning(
            "comm.exchange=%s saves bytes between nodes, and these %d ranks count as one node: all values "
            "travel in fp32. Nodes are those of torchrun's LOCAL_WORLD_SIZE, all of one size",
            exchange,
            nodes.per_node,
        )


def _candidates(
    config: CommConfig, make: Collectives, compressor: Compressor, num_values: int
) -> list[Candidate]:
    """What `auto` chooses from; in two levels only where there are two."""
    dense, sparse = ["ring", "tree"], ["all_gather", "star", "star_tree"]
    if make.nodes.num_nodes > 1 and make.nodes.per_node > 1:
        dense.append("two_level")
        sparse.append("hi_topk")
    num_kept = num_kept_of(num_values, config.ratio)
    select = keeping(compressor, num_kept, num_values)
    collectives = [make(name) for name in (*dense, *sparse)]
    if config.wire_dtype == "auto":  # a tree is for few values, which are soon sent as they are
        collectives += [make(name, codec) for name in dense if name != "tree" for codec in TRIED_CODECS]
    if not any(each.is_lossless for each in collectives):
        collectives.append(make.plain_ring())
    return [
        Candidate(name=each.name, collective=each, select=select, num_kept=num_kept) for each in collectives
    ]


def _compressor(config: CommConfig, rank: int) -> Compressor:
    makers: dict[str, Callable[[], Compressor]] = {
        "mstopk": MSTopK,
        "topk": TopK,
        "threshold": lambda: Threshold(config.threshold),
        "random": lambda: RandomK(
            rank
        ),  # ranks draw different values: together, more of the gradient travels
    }
    return makers[config.compressor]()


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
