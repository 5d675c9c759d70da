"""Assessment of what survived: reports of all workers, and the conclusions that every rank draws from them.

All reports are plain data that all ranks have in the same order, so that all come to the same conclusions.

`decide` says which kind of recovery they allow, with the reason for the log.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cpr.extent import Extent
from cpr.fields import check_fields
from cpr.recovery.decide.lineage import Directory
from cpr.recovery.run.report import KILLED, MEMORY_GONE, Ending, Kind

Columns = tuple[tuple[str, str, int], ...]
"""Name, dtype and number of dimensions of each column, by name."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """A shard of the new model, or a shard in memory that a worker holds."""

    extent: Extent
    columns: Columns
    bytes_per_row: int
    in_segment: bool = True
    """Of a shard of the new model: whether it lives in the worker's segment, and not on a GPU."""
    is_chosen: bool = False
    """Of a shard in a mirror: whether it holds only some rows (`mirror.rows`); the extent counts slots."""


@dataclass(frozen=True, order=True, kw_only=True)
class Slot:
    """A copy of the replicated state; the greatest is the newest."""

    went_back: int = -1
    """The last generation that went back to a checkpoint, which gave up all steps of older generations."""
    generation: int
    """Generation of the workers that wrote the copy."""
    step: int
    """Training steps done."""
    num_recoveries: int = 0
    """Number of finished recoveries in the copy, its own included once that is finished."""
    progress_generation: int = field(default=-1, compare=False)
    """The last generation that had finished a step."""
    losses: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)
    """World size, rank and loading generation of workers whose rows have come from a save."""

    def has_replaced(self, world_size: int, rank: int, generation: int) -> bool:
        """Whether a later generation has replaced the rows of a worker of this generation by saved ones."""
        return any(
            (size, lost) == (world_size, rank) and generation < since for size, lost, since in self.losses
        )

    def is_of_moment(self, other: "Slot") -> bool:
        """Whether both copies are of the same training step, which was not repeated in between."""
        return (self.went_back, self.step) == (other.went_back, other.step)


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """Memory of a dead worker that a new worker holds."""

    old_rank: int
    old_world_size: int
    generation: int
    """Generation that completed the memory."""
    epoch: int
    """Epoch of the directory's ownership under which the memory was trained; 0: none yet."""
    step_finished: int
    update_begun: int
    """Number of the last step in which rows began to change; -1: none."""
    pid: int
    left_ns: int
    """When the worker left by itself; -1: it was killed."""
    heartbeat_ns: int
    reason: str
    has_stopped: bool = False
    """Whether the worker, or one before, left for good, as when values were not finite."""
    shards: tuple[ShardReport, ...] = ()
    """Shards that are whole and readable."""
    whole_bytes: int = 0
    """Bytes of all shards of the worker: those that were in the segment, readable or not, and those that were
    elsewhere, as on a GPU."""
    slot: Slot | None = None
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Counters of the tables' optimizers, by table and name, as of the slot."""
    problem: str | None = None
    """Why something in the segment cannot be used."""
    steps: tuple[int, ...] = ()
    """Steps that rows and states can be brought to exactly; of a mirror, its moments."""
    is_mirror: bool = False
    """Whether this is the copy of `old_rank`'s rows that another worker kept; it has no slot."""
    samples: int | None = None
    """Of a mirror: samples trained by the run at `step_finished`; None: unknown."""
    share: float = 1.0
    """Of a mirror: share of its owner's shards' bytes that is in the rows which it holds."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What one worker holds and needs."""

    rank: int
    host: str
    pid: int
    segments: tuple[SegmentReport, ...] = ()
    """Memory that the worker holds; the first is the segment of its tables, if that is not new."""
    shards: tuple[ShardReport, ...] = ()
    """Shards of the new model, without replicated ones."""
    adopted: bool = False
    """Whether the new model lives, unchanged, in the first segment's memory."""
    refused: tuple[str, ...] = ()
    unreadable: str | None = None
    """Why memory that may be whole cannot be read now; nothing else is reported then."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """A shard in surviving memory."""

    rank: int
    """Worker of the new generation that holds the shard."""
    index: int
    """Number of the shard among those of this worker."""
    extent: Extent
    step: int
    """Training steps that the old worker had finished."""
    generation: int
    """Generation that completed the memory."""
    is_mirror: bool = False
    """Whether the shard is in the mirror of the worker that owned it."""
    is_chosen: bool = False
    """Whether the mirror holds only some rows of the shard; the extent counts its slots."""


@dataclass(frozen=True, kw_only=True)
class MirrorMoment:
    """The moment of a mirror that is used."""

    step: int
    """Training steps done."""
    samples: int | None
    """Samples trained by the run until then; None: unknown."""
    share: float = 1.0
    """Share of the bytes of the mirrored shards that is in the rows which it holds."""


@dataclass(frozen=True, kw_only=True)
class Needed:
    """A shard of the new generation."""

    rank: int
    extent: Extent
    bytes_per_row: int
    adopted: bool = False
    """Whether the shard lives, unchanged, in memory that was taken over."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What is left of the previous generation."""

    slot: Slot | None
    """The newest replicated state; None: there is none."""
    slot_of: tuple[int, int] | None
    """Worker and segment that hold that state."""
    interrupted: bool
    """Whether rows had begun to change in the next step."""
    held: tuple[Held, ...]
    """Shards of which all rows are held."""
    needed: tuple[Needed, ...]
    lost: dict[int, float] = field(default_factory=dict)
    """Share of its shards that each old worker lost."""
    old_world_size: int = 0
    """0: no worker holds memory."""
    endings: tuple[Ending, ...] = ()
    epoch: int = 0
    """The newest epoch of the memory."""
    stale: str | None = None
    """Why all memory is older than the checkpoint directory, if it is."""
    mismatch: str | None = None
    """Why the memory does not fit the new model."""
    refused: tuple[str, ...] = ()
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The newest counters of each table's optimizer, where known."""
    mirrored: Mapping[int, MirrorMoment] = field(default_factory=dict)
    """Old workers in `lost` of which there is a mirror."""
    chosen: tuple[Held, ...] = ()
    """Shards in mirrors of which only some rows are held."""
    remembered: frozenset[int] = frozenset()
    """Old workers whose own memory has their per-rank state of the newest step, whatever rows they lost."""
    brought_to: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Steps that memory is brought to before it is used, by worker and segment."""
    common_step: int | None = None
    """Step that the memory or the mirror of every old worker is brought to, also that of `slot`: no sample is
    lost. None: there is no such step."""

    @property
    def missing(self) -> list[int]:
        """Old workers in `lost` of which no mirror has all rows as of the newest replicated state."""
        step = None if self.slot is None else self.slot.step
        whole = {rank for rank, each in self.mirrored.items() if each.step == step and each.share == 1}
        return [rank for rank in self.lost if rank not in whole]


def assess(reports: Sequence[WorkerReport], directory: Directory) -> Assessment:
    """Draw conclusions from the reports of all workers, in order of rank.

    Memory counts if it descends from the newest save of the directory, and if its worker had finished the
    step of the newest replicated state, or died in that step, after the one before. Older memory was left
    behind. Memory older than a generation that went back to a checkpoint never counts, however many steps it
    has. The mirror of a worker counts if the worker's own memory does not, and no later generation has
    trained.

    If the memory or the mirror of each worker can be brought to one step, the newest such step is the one
    that training continues from: nothing of it is lost, and a batch that was interrupted is trained again.
    Otherwise memory is used as it is, and how far a mirror is behind is counted as PLS.
    """
    found = [_Found(report, at, each) for report in reports for at, each in enumerate(report.segments)]
    stale = {each.place: why for each in found if (why := each.why_stale(directory))}
    fresh = [each for each in found if each.place not in stale]
    # negative, so that of equal slots the one of the lowest rank is the greatest
    slots = [
        (each.segment.slot, (-each.report.rank, -each.at)) for each in fresh if each.segment.slot is not None
    ]
    slot, (minus_rank, minus_at) = max(slots, default=(None, (0, 0)))
    current = [each for each in fresh if slot is None or each.why_not(slot) is None]
    sizes = [(each.segment.generation, each.segment.old_world_size) for each in current]
    old_world_size = max(sizes, default=(0, 0))[1]
    best, mirrors = (
        {
            each.segment.old_rank: each
            for each in sorted(current, key=lambda each: each.age)
            if each.segment.old_world_size == old_world_size
            and each.segment.is_mirror == is_mirror
            and (not is_mirror or (each.segment.shards and each.segment.problem is None))
        }
        for is_mirror in (False, True)
    )
    lost = _lost_workers(old_world_size, best)
    mirrors = {rank: each for rank, each in mirrors.items() if rank in lost}
    current = [each for each in current if not each.segment.is_mirror or each in mirrors.values()]
    brought_to = {each.place: each.step for each in mirrors.values()}
    used = _used_together(old_world_size, best, mirrors)
    common_step = None if slot is None else _common_step(slot, used, directory)
    if slot is not None and common_step is not None:
        brought_to = {each.place: common_step for each in used}
        slot = replace(slot, step=common_step)
        holder = next(each for each in used if not each.segment.is_mirror)
        minus_rank, minus_at = -holder.report.rank, -holder.at
    held = [held for each in current for held in each.held(brought_to.get(each.place, each.step))]
    return Assessment(
        slot=slot,
        slot_of=None if slot is None else (-minus_rank, -minus_at),
        interrupted=slot is not None
        and common_step is None
        and any(each.was_interrupted(slot) for each in current),
        held=tuple(each for each in held if not each.is_chosen),
        chosen=tuple(each for each in held if each.is_chosen),
        needed=tuple(needed for report in reports for needed in _needed(report, current)),
        lost=lost,
        mirrored={
            rank: MirrorMoment(
                step=brought_to[each.place],
                samples=each.segment.samples,
                share=each.segment.share,
            )
            for rank, each in mirrors.items()
        },
        remembered=frozenset(
            rank
            for rank, each in best.items()
            if each.place in brought_to
            or (slot is not None and each.segment.slot is not None and each.segment.slot.is_of_moment(slot))
        ),
        brought_to=brought_to,
        common_step=common_step,
        old_world_size=old_world_size,
        endings=_endings(best, old_world_size),
        epoch=max((each.segment.epoch for each in current), default=0),
        stale=next(iter(stale.values()), None) if not fresh else None,
        mismatch=_mismatch(reports, current),
        refused=tuple(_refused(reports, found, slot, stale)),
        counters={
            table: counters
            for each in sorted(current, key=lambda each: each.age)
            for table, counters in each.segment.counters.items()
        },
    )


@dataclass(frozen=True)
class _Found:
    """A segment, and the worker that holds it."""

    report: WorkerReport
    at: int
    segment: SegmentReport

    @property
    def place(self) -> tuple[int, int]:
        return self.report.rank, self.at

    @property
    def step(self) -> int:
        slot = self.segment.slot
        return max(self.segment.step_finished, slot.step if slot else 0)

    @property
    def age(self) -> tuple[int, int]:
        """Sort key, oldest first."""
        return self.segment.generation, self.step

    def why_stale(self, directory: Directory) -> str | None:
        """Why this segment must not be used any more; None if it descends from the newest save."""
        return directory.why_stale(self.segment.epoch, self.step, is_mirror=self.segment.is_mirror)

    def why_not(self, newest: Slot) -> str | None:
        """Why this segment does not belong to the newest replicated state; None if it does."""
        if self.segment.generation < newest.went_back:
            return f"of before all workers went back in generation {newest.went_back}"
        if self.segment.generation < newest.progress_generation and self.step < newest.step:
            # It did not die in the next step, as one of that generation may have: others trained without it.
            return f"left behind at step {self.step} while others continued"
        if newest.has_replaced(self.segment.old_world_size, self.segment.old_rank, self.segment.generation):
            return "replaced by rows of a save, in a later generation"
        if self.step < newest.step - 1 and not self.segment.is_mirror:
            return f"left behind at step {self.step} while others continued"
        return None

    @property
    def is_partial(self) -> bool:
        """Whether something that was in the segment cannot be used."""
        return sum(map(_bytes, self.segment.shards)) < self.segment.whole_bytes

    def is_of_history(self, newest: Slot) -> bool:
        """Whether steps of these numbers are the ones that led to the newest replicated state."""
        slot = self.segment.slot
        if slot is None:
            return newest.progress_generation <= self.segment.generation <= newest.generation
        return (slot.went_back, slot.progress_generation) == (newest.went_back, newest.progress_generation)

    def was_interrupted(self, newest: Slot) -> bool:
        """Whether a step after the newest replicated state has changed rows and no recovery has counted it.

        A recovery reads `update_begun` and counts the step, so that a state of its generation includes it.
        """
        begun = self.step if self.segment.is_mirror else self.segment.update_begun
        return begun > newest.step and self.segment.generation >= newest.generation

    def held(self, step: int) -> Iterator[Held]:
        """Shards of this segment, brought to this step, numbered through all segments of its holder."""
        first = sum(len(each.shards) for each in self.report.segments[: self.at])
        for index, shard in enumerate(self.segment.shards, first):
            yield Held(
                rank=self.report.rank,
                index=index,
                extent=shard.extent,
                step=step,
                generation=self.segment.generation,
                is_mirror=self.segment.is_mirror,
                is_chosen=shard.is_chosen,
            )


def _used_together(
    old_world_size: int, best: Mapping[int, _Found], mirrors: Mapping[int, _Found]
) -> list[_Found]:
    """The memory that has, of each old worker, all rows once; nothing if something of them is missing."""
    used: list[_Found] = []
    for rank in range(old_world_size):
        own, mirror = best.get(rank), mirrors.get(rank)
        if own is not None and (mirror is None or own.segment.shards or own.segment.steps):
            used.append(own)
        if mirror is not None:
            used.append(mirror)
        elif own is None or own.is_partial:
            return []
    return used


def _common_step(newest: Slot, used: Sequence[_Found], directory: Directory) -> int | None:
    """The newest step that all of this memory can be brought to; None: there is no such step.

    It is not before the newest save, which would be of the future then.
    """
    if all(each.segment.is_mirror for each in used):
        return None
    if any(each.segment.problem or not each.is_of_history(newest) for each in used):
        return None
    if any(shard.is_chosen for each in used for shard in each.segment.shards):
        return None
    saved = directory.newest.step if directory.newest is not None else 0
    steps = set.intersection(*(set(each.segment.steps) for each in used))
    return max((step for step in steps if step >= saved), default=None)


def _needed(report: WorkerReport, current: Sequence[_Found]) -> Iterator[Needed]:
    taken_over = {
        shard.extent
        for each in current
        if each.report is report and each.at == 0 and report.adopted
        for shard in each.segment.shards
    }
    for shard in report.shards:
        yield Needed(
            rank=report.rank,
            extent=shard.extent,
            bytes_per_row=shard.bytes_per_row,
            adopted=shard.in_segment and shard.extent in taken_over,
        )


def _lost_workers(old_world_size: int, best: Mapping[int, "_Found"]) -> dict[int, float]:
    """Share of its shards that each worker of the previous generation lost, by rank; only shares above 0.

    A worker that had no shards and whose memory is gone counts as lost, because its shards are unknown.
    """
    lost: dict[int, float] = {}
    for rank in range(old_world_size):
        if rank not in best:
            lost[rank] = 1.0
        elif best[rank].is_partial:
            segment = best[rank].segment
            lost[rank] = 1 - sum(map(_bytes, segment.shards)) / segment.whole_bytes
    return lost


def _endings(best: Mapping[int, _Found], old_world_size: int) -> tuple[Ending, ...]:
    endings = []
    for rank in range(old_world_size):
        if (found := best.get(rank)) is None:
            endings.append(Ending(rank=rank, pid=None, host=None, why=MEMORY_GONE))
        else:
            segment = found.segment
            left_ns = segment.left_ns if segment.left_ns > 0 else None
            why = segment.reason or KILLED
            endings.append(
                Ending(rank=rank, pid=segment.pid, host=found.report.host, why=why, left_ns=left_ns)
            )
    return tuple(sorted(endings, key=lambda each: (each.left_ns or 0, each.rank)))


def _mismatch(reports: Sequence[WorkerReport], current: Sequence[_Found]) -> str | None:
    """How a table in memory differs from the model's; None if none does."""
    model = {shard.extent.table_fqn: shard for report in reports for shard in report.shards}
    for each in current:
        for shard in each.segment.shards:
            name = shard.extent.table_fqn
            if name not in model:
                return f"the model has no table {name} any more, which memory holds"
            now, then = _kind(model[name]), _kind(shard)
            if now != then:
                return f"table {name} is {now} in the model and {then} in memory"
    return None


def _refused(
    reports: Sequence[WorkerReport],
    found: Sequence[_Found],
    newest: Slot | None,
    stale: Mapping[tuple[int, int], str],
) -> Iterator[str]:
    for report in reports:
        yield from report.refused
    for each in found:
        what = "the mirror" if each.segment.is_mirror else "memory"
        whose = f"{what} of old rank {each.segment.old_rank} on {each.report.host}"
        why = stale.get(each.place) or (each.why_not(newest) if newest is not None else None)
        if why:
            yield f"{whose}: {why}"
        if each.segment.problem:
            yield f"{whose}: {each.segment.problem}"


def _kind(shard: ShardReport) -> str:
    rows, cols = shard.extent.table_shape
    return f"{rows} x {cols} ({', '.join(f'{name} {dtype} {dims}-d' for name, dtype, dims in shard.columns)})"


def _bytes(shard: ShardReport) -> int:
    return shard.extent.num_rows * shard.bytes_per_row


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    """Limits of partial recovery."""

    max_lost_share: float = 0.75
    """Largest share of the sharded tables' bytes that may come from the checkpoint while the rest keeps its
    live values; above it, all workers go back to the newest checkpoint. One of two nodes may hold somewhat
    more than half."""
    max_pls: float | None = None
    """Largest portion of lost samples (PLS) of the whole run (CPR paper). A failure that would exceed it is
    recovered fully, if that loses less: work is redone instead of being lost. A full recovery resets the
    portion to that of the save, plus what its rows are behind if it holds only some rows (see `priority` of
    `cpr.PartialRecovery`). None: no limit."""
    auc_per_pls: float | None = None
    """AUC that each unit of PLS is expected to cost, for the comparison of ways in log and report. None: as
    measured for the run's `priority` (`cpr.recovery.decide.comparison.AUC_PER_PLS`)."""
    max_generations_without_progress: int = 3
    """Number of generations of workers in a row that may die without finishing a training step; the next one
    stops the run with a report."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.max_lost_share <= 1:
            raise ValueError(f"max_lost_share is {self.max_lost_share}; it is a share, from 0 to 1")
        if self.max_pls is not None and not 0 <= self.max_pls <= 1:
            raise ValueError(f"max_pls is {self.max_pls}; it is a portion, from 0 to 1, or None for no limit")
        if self.auc_per_pls is not None and self.auc_per_pls < 0:
            raise ValueError(f"auc_per_pls is {self.auc_per_pls}; it is an AUC that is lost: 0 or more")
        if self.max_generations_without_progress < 1:
            raise ValueError(
                f"max_generations_without_progress is {self.max_generations_without_progress}; "
                "it must be at least 1"
            )


@dataclass(frozen=True)
class Decision:
    """Kind of recovery, and the reason."""

    kind: Kind
    reason: str


def decide(
    found: Assessment,
    *,
    lost_share: float,
    continues: bool,
    resumes: bool,
    is_saved: bool,
) -> Decision:
    """Decide how this generation of workers can start, from facts that are equal on all ranks.

    Where live memory can be used, `cpr.recovery.decide.comparison` tells whether it should be.

    Args:
        found: what is left of the previous generation.
        lost_share: share of the sharded tables' bytes whose memory is gone.
        continues: whether earlier workers of this run have trained.
        resumes: whether a run without live memory may load the saves in its directory.
        is_saved: whether the checkpoint directory holds a state.
    """
    if not continues or not (found.old_world_size or found.stale or resumes):
        if resumes and is_saved:
            return Decision("resume", "the run resumes from the newest checkpoint")
        return Decision("start", "nothing was saved yet" if resumes else "the run starts over")
    reason = _against_live_memory(found, lost_share, is_saved)
    if reason is not None:
        beginning = "" if is_saved else ", and nothing was saved yet: training begins at the beginning"
        return Decision("full", f"{reason}{beginning}")
    mirrored = _mirror_text(found)
    if lost_share == 0:
        reason = f"lost rows come from {mirrored}" if mirrored else "the memory of all workers survived"
        exactly = ", and all workers continue exactly from there" if found.common_step is not None else ""
        return Decision("mirror" if mirrored else "process", f"{reason}{exactly if mirrored else ''}")
    also = f"; others that were lost come from {mirrored}" if mirrored else ""
    return Decision("partial", f"{lost_share:.1%} of the tables were lost{also}")


def _mirror_text(found: Assessment) -> str:
    return ", ".join(
        f"the mirror of rank {rank} (step {moment.step})" for rank, moment in sorted(found.mirrored.items())
    )


def _against_live_memory(found: Assessment, lost_share: float, is_saved: bool) -> str | None:
    if not found.old_world_size:
        return f"live memory is {found.stale}" if found.stale else "no worker's memory is left"
    if found.mismatch is not None:
        return found.mismatch
    if found.slot is None:
        return "no worker holds a whole copy of the dense parameters"
    if lost_share and not is_saved:
        return f"{lost_share:.1%} of the tables were lost"
    return None
