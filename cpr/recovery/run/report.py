"""The story of one recovery: for the log, for the run report, and for the state that outlives workers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

from cpr.recovery.run.phases import PHASES

NO_LAST_WORD = "no last word: kill -9, out of memory, or told to stop while it waited for others"
MEMORY_GONE = "gone with its memory"

Kind = Literal["start", "resume", "process", "partial", "full"]
"""`start`: from the beginning; `resume`: a new run that loads the newest checkpoint; `process`: workers died
and everything they held is still there; `partial`: what nobody holds comes from the checkpoint; `full`:
everybody goes back to it."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a worker of the generation before ended."""

    rank: int
    """Its rank in that generation."""
    pid: int | None
    """None where nobody knows."""
    host: str | None
    why: str
    left_ns: int | None = None
    """When it left of its own accord, `time.time_ns()`."""

    def __str__(self) -> str:
        who = f"rank {self.rank}"
        if self.pid is not None:
            who += f" (process {self.pid} on {self.host})"
        return f"{who}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class RowOrigin:
    """Where the rows of a table came from, over all its shards."""

    table_fqn: str
    adopted: int = 0
    """Rows x shards that stayed where they were."""
    moved: int = 0
    """Rows x shards that were copied from other memory."""
    lost: int = 0
    """Rows x shards that came from the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ShardLoss:
    """What the rows of one new shard that came from the checkpoint are without."""

    rank: int
    """New owner."""
    table_fqn: str
    num_rows: int
    samples: int
    """Trained by the run between the save and the failure."""
    pls: float | None
    """This shard's part of `Recovery.pls_added`, by its share of the lost bytes."""
    pls_expected: float | None = None
    """The same of `Recovery.pls_expected`."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How one generation of workers began."""

    kind: Kind
    reason: str
    generation: int
    step: int
    """Training steps done, from which it goes on."""
    interrupted: bool = False
    """Whether rows had begun to change in the step after: its batch is skipped."""
    dead: tuple[Ending, ...] = ()
    """Workers of the generation before, by rank: those that gave no reason, or lost their memory, first."""
    sources: tuple[RowOrigin, ...] = ()
    """By table."""
    lost_share: float = 0.0
    """Of the sharded tables' bytes: what nobody held any more."""
    losses: tuple[ShardLoss, ...] = ()
    """By shard, where rows came from the checkpoint while others went on."""
    save_step: int | None = None
    """Training steps done in the save that lost rows, or everything, came from; None: nothing was read."""
    bytes_read: int = 0
    """From the checkpoint, by all ranks."""
    bytes_moved: int = 0
    """Of rows, copied out of memory that outlived its worker, by all ranks."""
    refused: tuple[str, ...] = ()
    """Memory that was found and not used, with the reason."""
    pls_added: float | None = 0.0
    """By rows that came from a save; where everybody went back, by what rows were behind that save's step.
    None: not known, because `total_samples` was not given."""
    pls_expected: float | None = None
    """What such a loss adds on average, at a random moment; None: not known, or nothing was lost."""
    pls_total: float | None = 0.0
    world_size: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase, see `cpr.recovery.run.phases`; of rank 0."""
    finished: bool = True
    """Whether training went on from it; else these workers died before."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {**asdict(self), "seconds": dict(self.seconds)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read one back."""
        known = {name: data[name] for name in (each.name for each in fields(cls)) if name in data}
        known["dead"] = tuple(Ending(**each) for each in known.get("dead", ()))
        known["sources"] = tuple(RowOrigin(**each) for each in known.get("sources", ()))
        known["losses"] = tuple(ShardLoss(**each) for each in known.get("losses", ()))
        known["refused"] = tuple(known.get("refused", ()))
        return cls(**known)

    def __str__(self) -> str:
        lines = [f"generation {self.generation} begins at step {self.step} ({self.kind}): {self.reason}"]
        if not self.finished:
            lines.append("  it did not finish: its workers ended before the first step")
        lines += [f"  ended: {ending}" for ending in self.dead]
        lines += [f"  not used: {refused}" for refused in self.refused]
        if self.kind in {"process", "partial"}:
            lines += [f"  rows: {_told(origin, self.save_step)}" for origin in self.sources]
            if self.interrupted:
                lines.append(f"  step {self.step + 1} was interrupted: its batch is skipped")
        if self.kind in {"process", "partial", "full"} or self.pls_added != 0:
            lines.append(f"  PLS: {_share(self.pls_added)} added, {_share(self.pls_total)} in total")
            if self.pls_expected is not None:
                lines.append(f"  (such a loss adds {self.pls_expected:.6f} on average, at a random moment)")
        if self.seconds:
            told = [f"{phase} {self.seconds[phase]:.2f}" for phase in PHASES if phase in self.seconds]
            lines.append(f"  seconds: {', '.join(told)}; together {sum(self.seconds.values()):.2f}")
        return "\n".join(lines)


def _told(origin: RowOrigin, save_step: int | None) -> str:
    parts = [
        (origin.adopted, "in place"),
        (origin.moved, "moved from memory"),
        (origin.lost, f"from the save of step {save_step}"),
    ]
    return f"{origin.table_fqn}: " + ", ".join(f"{count:,} {how}" for count, how in parts if count)


def _share(pls: float | None) -> str:
    return "unknown (total_samples was not given)" if pls is None else f"{pls:.6f}"
