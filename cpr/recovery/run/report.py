"""Report of one recovery, for the log, the run report and the checkpoint; and a clock of its phases."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, Self

from cpr.processes import Process

PHASES: Final = (
    *("detect", "restart", "imports", "rendezvous", "build", "reattach", "restore", "first_step"),
)
"""Phases of a recovery, in order. `detect`: from the dead worker's last heartbeat until the first survivor
left; `restart`: until this process began; `imports`: until `PartialRecovery` was made; `rendezvous`, `build`:
those calls; `reattach`: finding out which memory is left; `restore`: putting rows and states in place;
`first_step`: until the first new step is finished. Time between these blocks belongs to no phase."""
KILLED: Final = "no reason given: kill -9, out of memory, or told to stop while it waited for others"
MEMORY_GONE: Final = "gone with its memory"

Kind = Literal["start", "resume", "process", "mirror", "partial", "full"]
"""How workers start. `start`: from the beginning; `resume`: a new run loads the newest checkpoint; `process`:
workers died and all their memory is left; `mirror`: rows whose memory is gone come from their mirrors;
`partial`: some of them come from the checkpoint; `full`: all workers go back to the checkpoint."""
LIVE: Final = frozenset({"process", "mirror", "partial"})
"""Kinds in which memory that is left stays as it is."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a worker of the previous generation ended."""

    rank: int
    """Rank in that generation."""
    pid: int | None
    """Process id, or None if unknown."""
    host: str | None
    why: str
    left_ns: int | None = None
    """`time.time_ns()` when the worker left by itself; None if it was killed."""

    def __str__(self) -> str:
        process = "" if self.pid is None else f" (process {self.pid} on {self.host})"
        return f"rank {self.rank}{process}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class RowOrigin:
    """Where the rows of a table came from, summed over all its shards."""

    table_fqn: str
    adopted: int = 0
    """Rows x shards that stayed in place."""
    moved: int = 0
    """Rows x shards that were copied from other memory."""
    mirrored: int = 0
    """Rows x shards that were copied from mirrors."""
    lost: int = 0
    """Rows x shards that came from the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ShardLoss:
    """What one new shard lost because some of its rows came from the checkpoint."""

    rank: int
    """New owner."""
    table_fqn: str
    num_rows: int
    samples: int
    """Samples trained by the run between the save and the failure."""
    pls: float | None
    """This shard's part of `Recovery.pls_added`, by its share of the lost bytes."""
    pls_expected: float | None = None
    """This shard's part of `Recovery.pls_expected`."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to recover from a failure, and what it costs, estimated before any row is moved.

    The last four fields are filled in by `cpr.recovery.decide.comparison.compare`.
    """

    name: str
    """`in place`, `mirror`, `checkpoint rows` or `full`; both middle ones where some rows have no mirror."""
    rows_s: float
    """Seconds until all rows are in place, on the worker that takes longest."""
    redone: int = 0
    """Samples that are trained again."""
    lost: float = 0.0
    """Samples whose training is lost: averaged over the nodes, as in PLS, but not divided by all samples."""
    lost_share: float = 0.0
    """Share of the sharded tables' bytes that comes from the checkpoint while the rest keeps its values."""
    pls_added: float | None = 0.0
    """PLS added to that of the run; negative where going back resets it; None: unknown."""
    pls: float | None = 0.0
    """PLS of the run afterwards; None: unknown."""
    seconds: float | None = None
    """`rows_s`, and the time to train again; None: how long a step takes is not known yet."""
    auc_lost: float | None = None
    """AUC that the added PLS is expected to cost; None: unknown."""
    objection: str | None = None
    """Why a limit of the policy forbids this way; None: it is allowed."""
    is_chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Report of how one generation of workers started."""

    kind: Kind
    reason: str
    generation: int
    step: int
    """Training steps done at the start."""
    interrupted: bool = False
    """Whether the next step had begun to change rows: its batch is half applied."""
    dead: tuple[Ending, ...] = ()
    """Workers of the previous generation: first those that were killed or lost their memory, by rank."""
    sources: tuple[RowOrigin, ...] = ()
    """Origin of the rows, by table."""
    lost_share: float = 0.0
    """Share of the sharded tables' bytes whose memory was gone."""
    losses: tuple[ShardLoss, ...] = ()
    """Losses by shard, where rows came from the checkpoint in a partial recovery."""
    save_step: int | None = None
    """Training steps done in the oldest save that was read; None: nothing was read."""
    mirror_step: int | None = None
    """Training steps done in the oldest mirror that was used; None: none was."""
    mirror_rounded: int = 0
    """Rows whose weights had reached the mirrors that were used only rounded (`mirror.wire_dtype`)."""
    bytes_read: int = 0
    """Bytes read from the checkpoint, by all ranks."""
    bytes_moved: int = 0
    """Bytes of rows copied out of surviving memory, by all ranks."""
    ways: tuple[Way, ...] = ()
    """Ways that were open, in order of preference; none where no live memory could be used."""
    load_bytes_per_s: float | None = None
    """Bytes of rows read from the checkpoint in a second, by the slowest worker; None: too few to tell."""
    move_bytes_per_s: float | None = None
    """Bytes of rows copied out of surviving memory in a second, by the slowest worker; None: too few."""
    refused: tuple[str, ...] = ()
    """Memory that was found and not used, with the reason."""
    pls_added: float | None = 0.0
    """PLS added by rows older than the run; None: unknown, because `total_samples` was not given."""
    pls_expected: float | None = None
    """PLS that such a loss adds on average, at a random moment; None: unknown, or nothing was lost."""
    pls_total: float | None = 0.0
    world_size: int = 1
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (`PHASES`), of rank 0."""
    finished: bool = True
    """Whether training continued; False: these workers died before."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {**asdict(self), "seconds": dict(self.seconds)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a report written by `to_dict`, also of another version of this class."""
        known = {name: data[name] for name in (each.name for each in fields(cls)) if name in data}
        known["dead"] = tuple(Ending(**each) for each in known.get("dead", ()))
        known["sources"] = tuple(RowOrigin(**each) for each in known.get("sources", ()))
        known["losses"] = tuple(ShardLoss(**each) for each in known.get("losses", ()))
        known["ways"] = tuple(Way(**each) for each in known.get("ways", ()))
        known["refused"] = tuple(known.get("refused", ()))
        return cls(**known)

    def __str__(self) -> str:
        lines = [f"generation {self.generation} begins at step {self.step} ({self.kind}): {self.reason}"]
        if not self.finished:
            lines.append("  it did not finish: its workers ended before the first step")
        lines += [f"  ended: {ending}" for ending in self.dead]
        lines += [f"  not used: {refused}" for refused in self.refused]
        if self.kind in LIVE:
            lines += [
                f"  rows: {_origin_text(origin, self.mirror_step, self.save_step)}" for origin in self.sources
            ]
            if self.mirror_rounded:
                lines.append(f"  of the rows in mirrors, {self.mirror_rounded:,} were rounded as yet")
            if self.interrupted:
                lines.append(f"  step {self.step + 1} was interrupted: its batch is half applied")
        if self.kind in {*LIVE, "full"} or self.pls_added != 0:
            lines.append(f"  PLS: {_pls_text(self.pls_added)} added, {_pls_text(self.pls_total)} in total")
            if self.pls_expected is not None:
                lines.append(f"  (such a loss adds {self.pls_expected:.6f} on average, at a random moment)")
        if self.seconds:
            phases = [f"{phase} {self.seconds[phase]:.2f}" for phase in PHASES if phase in self.seconds]
            lines.append(f"  seconds: {', '.join(phases)}; together {sum(self.seconds.values()):.2f}")
        return "\n".join(lines)


def _origin_text(origin: RowOrigin, mirror_step: int | None, save_step: int | None) -> str:
    parts = [
        (origin.adopted, "in place"),
        (origin.moved, "moved from memory"),
        (origin.mirrored, f"from the mirror of step {mirror_step}"),
        (origin.lost, f"from the save of step {save_step}"),
    ]
    return f"{origin.table_fqn}: " + ", ".join(f"{count:,} {how}" for count, how in parts if count)


def _pls_text(pls: float | None) -> str:
    return "unknown (total_samples was not given)" if pls is None else f"{pls:.6f}"


class Phases:
    """Clock that adds up the seconds of each phase of a recovery."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase; negative ones, from clocks of two machines, count as 0."""
        assert phase in PHASES
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, seconds)

    def add_death(self, left_ns: Sequence[int], heartbeats_ns: Sequence[int]) -> None:
        """Add the phases before this process began, from `time.time_ns()` of workers' ends.

        They left by themselves, or were killed after their last heartbeat.
        """
        died_ns = max(heartbeats_ns, default=None)
        noticed_ns = min(left_ns, default=died_ns)
        if noticed_ns is None:
            return
        if left_ns and died_ns is not None:
            self.add("detect", (noticed_ns - died_ns) / 1e9)
        self.add("restart", (process_began_ns() - noticed_ns) / 1e9)


def process_began_ns() -> int:
    """When this process began, as `time.time_ns()`, accurate to 10 ms."""
    began_s = Process.this().start_ticks / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return time.time_ns() - int(age_s * 1e9)
