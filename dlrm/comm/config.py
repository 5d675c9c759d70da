"""Configuration of the exchange of dense gradients; imports no torch, which takes seconds."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from cpr.fields import check_fields

DenseExchange = Literal["dense", "ring", "tree", "two_level", "priority"]
SparseExchange = Literal["all_gather", "star", "star_tree", "var", "var_tree", "hi_topk"]
ExchangeName = Literal[DenseExchange, SparseExchange, "selsync", "auto"]
CompressorName = Literal["mstopk", "topk", "threshold", "random"]
CodecName = Literal["fp32", "bf16", "fp16", "int8"]
ControllerName = Literal["fixed", "gravac", "gravac_geometric", "pareto"]

DENSE: Final = get_args(DenseExchange)
"""Exchanges that send all values."""
SPARSE: Final = get_args(SparseExchange)
"""Exchanges that send selected values and keep the rest as a residual."""
EXCHANGES: Final = get_args(ExchangeName)
PLAIN: Final = ("dense", "priority", "selsync")
"""Exchanges in fp32 that keep no residual."""
CODECS: Final = get_args(CodecName)
TRIED_CODECS: Final = ("bf16", "int8")
"""Encodings that `auto` tries besides fp32 where wire_dtype is not given; fp16 takes as long as bf16."""
COMPRESSORS: Final = get_args(CompressorName)
CONTROLLERS: Final = get_args(ControllerName)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How ranks exchange dense gradients; for tables, see section sharding."""

    exchange: ExchangeName = "dense"
    """`dense`: one fp32 all-reduce. Other dense sums: `ring`, `tree`, `two_level`, or `priority` (P3: slices,
    in the order in which the next forward pass needs them). Sums of selected values: `all_gather`; AR-Topk
    over a ring (`star`: ranks select in turn; `var`: the rank with most energy selects) or over a tree
    (`star_tree`, `var_tree`); `hi_topk` (sparse between nodes only). `selsync` averages parameters, when
    gradients have changed much. `auto` tries the exchanges during training and keeps the fastest."""
    compressor: CompressorName = "mstopk"
    """Which values are selected: the largest (`mstopk`, fast; `topk`, PyTorch's), `random` ones (which may
    diverge with momentum, such as that of dense.optimizer=lars), or those that reach a `threshold`."""
    ratio: float = 0.01
    """Share of the values that a rank sends, with controller `fixed`; of compressor `threshold`, at most."""
    threshold: float = 0.0
    """compressor `threshold`: smallest magnitude that is sent."""
    wire_dtype: Literal[CodecName, "auto"] = "auto"
    """Encoding of values on the wire: `fp32`, `bf16`, `fp16`, or `int8` with a scale for every 1,024 values.
    `auto`: `fp32`; exchange `auto` also tries dense sums in `bf16` and `int8`."""
    error_feedback: bool = True
    """Whether values that were not sent are added to the next gradient; false: they are lost, with exchange
    `auto` also in the steps in which it tries other exchanges."""
    controller: ControllerName = "fixed"
    """How much is sent: the share `ratio` (`fixed`), or a share that is found by trying: `gravac`,
    `gravac_geometric` (in smaller steps) or `pareto`."""
    min_gain: float = 0.7
    """controllers `gravac`: smallest share of the gradient's energy that is sent, averaged over steps."""
    window_steps: int = 500
    """controllers `gravac`: steps for which each ratio is tried."""
    sync_change: float = 0.3
    """`selsync`: relative change of a gradient's energy above which ranks average; 0: in each step."""

    def __post_init__(self) -> None:
        check_fields(self, "comm.")
        _check(0 < self.ratio <= 1, "comm.ratio is a share, above 0 and at most 1")
        _check(0 < self.min_gain <= 1, "comm.min_gain is a share, above 0 and at most 1")
        _check(self.window_steps > 0, "comm.window_steps must be positive")
        _check(self.sync_change >= 0, "comm.sync_change must not be negative")
        _check(self.threshold >= 0, "comm.threshold must not be negative")
        _check(
            (self.threshold > 0) == (self.compressor == "threshold"),
            "comm.threshold and comm.compressor=threshold go together; set both, or none",
        )
        _check(
            self.compressor != "threshold" or (self.controller == "fixed" and self.ratio < 1),
            "comm.compressor=threshold decides how much is sent, at most comm.ratio of it: leave "
            "comm.controller at fixed and comm.ratio below 1",
        )
        self._refuse_unread()

    @property
    def is_sparse(self) -> bool:
        """Whether the exchange sends selected values only, or may."""
        return self.exchange == "auto" or self.exchange in SPARSE

    @property
    def codec(self) -> str:
        """Encoding of values, one of `CODECS`; exchange `auto` may choose another."""
        return "fp32" if self.wire_dtype == "auto" else self.wire_dtype

    def _refuse_unread(self) -> None:
        _check(
            self.codec == "fp32" or self.exchange not in PLAIN,
            f"comm.exchange={self.exchange} is fp32; for comm.wire_dtype={self.wire_dtype} set comm.exchange "
            "to ring, or another one that encodes",
        )
        _check(
            self.is_sparse or (self.compressor == "mstopk" and self.controller == "fixed"),
            f"comm.exchange={self.exchange} sends all values: comm.compressor and comm.controller are for "
            f"auto, {', '.join(SPARSE)}",
        )
        _check(
            self.ratio == CommConfig.ratio or (self.is_sparse and self.controller == "fixed"),
            f"comm.ratio is read by comm.controller=fixed and by no comm.exchange that sends all values, and "
            f"comm.exchange is {self.exchange}, comm.controller {self.controller}; for a share of the values "
            f"set comm.exchange to auto, {', '.join(SPARSE)}",
        )
        _check(
            (self.min_gain, self.window_steps) == (CommConfig.min_gain, CommConfig.window_steps)
            or self.controller.startswith("gravac"),
            "comm.min_gain and comm.window_steps are for comm.controller=gravac or gravac_geometric, and it "
            f"is {self.controller}: leave them out, or set it",
        )
        _check(
            self.sync_change == CommConfig.sync_change or self.exchange == "selsync",
            f"comm.sync_change is for comm.exchange=selsync, and it is {self.exchange}: leave it out, or set "
            "that",
        )
        _check(
            self.exchange != "auto" or self.controller == "fixed",
            f"comm.exchange=auto compares ways to send the same share of values, and comm.controller="
            f"{self.controller} changes the share: name an exchange, such as all_gather, or set "
            "comm.controller=fixed",
        )
        _check(
            self.error_feedback or self.exchange not in PLAIN,
            f"comm.exchange={self.exchange} keeps no residual: leave comm.error_feedback as it is",
        )
