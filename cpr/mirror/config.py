"""Configuration of mirrors, and what a mirror has cost; imports no torch, which takes seconds."""

from dataclasses import dataclass
from typing import Literal

from cpr.fields import check_fields
from cpr.humanize import count_text, parse_size, share_text

WireDtype = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """A copy of each worker's rows in the memory of another node, for the case that a node is lost.

    Requires partial recovery, at least two nodes, and shared memory for as many rows again on each node.
    """

    to: Literal["none", "neighbour", "host"] = "none"
    """Where the copy is: `neighbour`, with the worker of the same place on the next node, in a ring; `host`,
    in shared memory of the worker's own node, of tables that are not there already, such as those on a GPU,
    for the case that a worker is killed; or `none`."""
    rows: Literal["all", "priority"] = "all"
    """Which rows the copy holds: `all`, or of large tables those that `scheme` chooses within `memory`, now
    and then anew. Other lost rows come from the checkpoint then, and are as old as their save."""
    scheme: Literal["mfu", "ssu"] = "mfu"
    """How rows are chosen: the most frequently used ones, or a sub-sampled list of used ones, as for priority
    saves; for `rows=priority`."""
    memory: str = ""
    """Shared memory for the copy of one worker's rows, such as `4GB`; needed for `rows=priority`. It must
    hold small tables whole and a hundredth of the rows of large ones."""
    every_steps: int = 1
    """Changed rows are sent after every so many steps; after more while the network is still busy with the
    ones before, as training does not wait for it."""
    wire_dtype: WireDtype = "fp32"
    """How weights of changed rows travel: exactly, or rounded to bfloat16, or to int8 with a scale for each
    row. What rounding leaves follows in later moments, for rows that have not changed since, so that the
    mirror becomes exact. Optimizer state, weights that are not float32, and tables without a fused optimizer
    always travel exactly."""

    def __post_init__(self) -> None:
        try:
            num_bytes = parse_size(str(self.memory) or "0B")  # a number without a unit is no text
        except ValueError:
            raise ValueError(
                f"mirror.memory is {self.memory}; write a number with its unit, such as 500MB or 4GB"
            ) from None
        check_fields(self, "mirror.")
        if self.memory and not num_bytes:
            raise ValueError(
                f"mirror.memory={self.memory} has no room for any row: give a size such as 4GB, or leave it "
                "out, with mirror.rows=all for a mirror of all rows, or mirror.to=none for no mirror"
            )
        if self.every_steps < 1:
            raise ValueError(f"mirror.every_steps is {self.every_steps}; it must be at least 1")
        if self.rows == "priority" and not self.memory:
            raise ValueError(
                "mirror.rows=priority mirrors as many rows as fit into mirror.memory: set that, e.g. to 4GB"
            )
        if self.rows == "all" and self.memory:
            raise ValueError(
                f"mirror.memory={self.memory} limits a mirror of chosen rows: set mirror.rows=priority, too"
            )

    @property
    def memory_bytes(self) -> int:
        """`memory` in bytes; 0: none was given."""
        return parse_size(self.memory or "0B")


@dataclass(frozen=True, kw_only=True)
class MirrorFigures:
    """What the mirror of one worker's rows has cost, and how old it was."""

    moments: int = 0
    """Whole moments that have arrived."""
    num_bytes: int = 0
    """Bytes of these moments."""
    num_rows: int = 0
    """Rows in them."""
    age: int = 0
    """Steps that the mirror is behind."""
    oldest: int = 0
    """Most steps that it was behind, once whole."""
    rounded: int = 0
    """Rows in its newest moment whose weights are rounded as yet."""
    share: float = 1.0
    """Share of the worker's bytes that is in the rows which it holds."""

    def __str__(self) -> str:
        if not self.moments:
            return "it was never whole"
        size = self.num_bytes / self.moments / 1e6
        rows = self.num_rows / self.moments
        rounded = f"; {count_text(self.rounded, 'row')} rounded at the end" if self.rounded else ""
        share = f"; it holds {share_text(self.share)} of the tables" if self.share < 1 else ""
        return (
            f"{count_text(self.moments, 'moment')} of {count_text(round(rows), 'row')} and {size:,.2f} MB; "
            f"at most {count_text(self.oldest, 'step')} behind{rounded}{share}"
        )
