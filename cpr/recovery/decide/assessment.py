"""What every worker tells after the model is built, and what follows from all reports together.

All of it is plain data that all ranks have in the same order, so that each comes to the same conclusions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cpr.extent import Extent
from cpr.recovery.decide.lineage import Directory
from cpr.recovery.decide.transfer_plan import Held, Needed
from cpr.recovery.run.pls import lost_workers
from cpr.recovery.run.report import MEMORY_GONE, NO_LAST_WORD, Ending

Columns = tuple[tuple[str, str, int], ...]
"""Name, dtype and number of dimensions of each column, by name."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """A shard: of the new model, or in memory that a worker holds."""

    extent: Extent
    columns: Columns
    bytes_per_row: int
    in_segment: bool = True
    """Of a shard of the new model: whether its memory is the worker's segment, and not a GPU's."""


@dataclass(frozen=True, order=True, kw_only=True)
class Slot:
    """A whole copy of what all ranks have alike; the greater one is nearer to where the run is."""

    went_back: int = -1
    """The last generation that went back to a checkpoint: the steps before it were given up, however many."""
    generation: int
    """Of the workers that wrote it."""
    step: int
    """Training steps done."""
    num_recoveries: int = 0
    """Finished beginnings of generations that it tells of: its own is finished while this is written."""
    progress_generation: int = field(default=-1, compare=False)
    """The last generation that had finished a step."""
    losses: tuple[tuple[int, int, int], ...] = field(default=(), compare=False)
    """World size, rank and generation of the workers whose rows have come from a save, and since when."""

    def has_replaced(self, world_size: int, rank: int, generation: int) -> bool:
        """Whether the rows of a worker of this generation came from a save in a later one."""
        return any(
            (size, lost) == (world_size, rank) and generation < since for size, lost, since in self.losses
        )

    def is_of_moment(self, other: "Slot") -> bool:
        """Whether both are of the same step, and it was not done again in between."""
        return (self.went_back, self.step) == (other.went_back, other.step)


@dataclass(frozen=True, kw_only=True)
class SegmentReport:
    """Memory of a dead worker that a new one holds."""

    old_rank: int
    old_world_size: int
    generation: int
    """In which it was completed."""
    epoch: int
    """Of the ownership of the checkpoint directory under which it was trained; 0: of none yet."""
    step_finished: int
    update_begun: int
    """Number of the last step in which rows began to change; -1: none."""
    pid: int
    left_ns: int
    """-1: it had no last word."""
    heartbeat_ns: int
    reason: str
    diverged: bool = False
    """Whether that is that values are no numbers."""
    shards: tuple[ShardReport, ...] = ()
    """Whole and readable."""
    whole_bytes: int = 0
    """Of all shards that were in it, readable or not."""
    slot: Slot | None = None
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of the tables' optimizers, by table and name, from the slot."""
    problem: str | None = None
    """Why something in it cannot be used."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What a worker brings: what it holds, and what it needs."""

    rank: int
    host: str
    pid: int
    segments: tuple[SegmentReport, ...] = ()
    """The first is the one that its tables live in, if it was there before."""
    shards: tuple[ShardReport, ...] = ()
    """Of the new model, without those that all ranks have."""
    adopted: bool = False
    """Whether the new model lives in the first segment's memory as it was."""
    refused: tuple[str, ...] = ()
    unreadable: str | None = None
    """Why memory that it holds, and that may be whole, cannot be read now; nothing else is reported then."""


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """What is left of the generation before."""

    slot: Slot | None
    """The newest replicated state; None: there is none."""
    slot_of: tuple[int, int] | None
    """Worker and segment that have it."""
    interrupted: bool
    """Whether rows had begun to change in the step after."""
    held: tuple[Held, ...]
    needed: tuple[Needed, ...]
    lost: dict[int, float] = field(default_factory=dict)
    """Share of its shards that each old worker lost."""
    old_world_size: int = 0
    """0: nobody holds anything."""
    endings: tuple[Ending, ...] = ()
    epoch: int = 0
    """The newest of what is left."""
    stale: str | None = None
    """Why all that is held must not be used, if it is because the checkpoint directory has moved on."""
    objection: str | None = None
    """Why what is held does not fit the new model."""
    refused: tuple[str, ...] = ()
    counters: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The newest of each table, as far as they are known."""

    @property
    def step(self) -> int | None:
        """Training steps done in the newest replicated state; None: there is none."""
        return None if self.slot is None else self.slot.step


def assess(reports: Sequence[WorkerReport], directory: Directory) -> Assessment:
    """Draw conclusions from the reports of all workers, by rank.

    Memory counts if it descends from the newest save of the directory, and if its worker had finished the
    step of the newest replicated state, or the one before that, in which it was then killed; what is older
    was left behind while others went on. Memory of before a generation that went back to a checkpoint does
    not count, however far it had come.
    """
    everything = [_Found(report, at, each) for report in reports for at, each in enumerate(report.segments)]
    stale = {
        each.place: why for each in everything if (why := directory.why_stale(each.segment.epoch, each.step))
    }
    fresh = [each for each in everything if each.place not in stale]
    slots = [
        (each.segment.slot, (-each.report.rank, -each.at)) for each in fresh if each.segment.slot is not None
    ]
    slot, (minus_rank, minus_at) = max(slots, default=(None, (0, 0)))
    current = [each for each in fresh if slot is None or each.why_not(slot) is None]
    sizes = [(each.segment.generation, each.segment.old_world_size) for each in current]
    old_world_size = max(sizes, default=(0, 0))[1]
    best = _best_of_each_rank(current, old_world_size)
    return Assessment(
        slot=slot,
        slot_of=None if slot is None else (-minus_rank, -minus_at),
        interrupted=slot is not None and any(each.was_interrupted(slot) for each in current),
        held=tuple(held for each in current for held in each.held()),
        needed=tuple(needed for report in reports for needed in _needed(report, current)),
        lost=lost_workers(
            old_world_size,
            {rank: sum(_bytes(shard) for shard in each.segment.shards) for rank, each in best.items()},
            {rank: each.segment.whole_bytes for rank, each in best.items()},
        ),
        old_world_size=old_world_size,
        endings=_endings(best, old_world_size),
        epoch=max((each.segment.epoch for each in current), default=0),
        stale=next(iter(stale.values()), None) if not fresh else None,
        objection=_objection(reports, current),
        refused=tuple(_refused(reports, everything, slot, stale)),
        counters={
            table: counters
            for each in sorted(current, key=lambda each: each.age)
            for table, counters in each.segment.counters.items()
        },
    )


@dataclass(frozen=True)
class _Found:
    """A segment, and who holds it."""

    report: WorkerReport
    at: int
    segment: SegmentReport

    @property
    def place(self) -> tuple[int, int]:
        """Which worker holds it, and its number there."""
        return self.report.rank, self.at

    @property
    def step(self) -> int:
        slot = self.segment.slot
        return max(self.segment.step_finished, slot.step if slot else 0)

    @property
    def age(self) -> tuple[int, int]:
        """The smaller, the older."""
        return self.segment.generation, self.step

    def why_not(self, newest: Slot) -> str | None:
        """Why this does not belong to the newest replicated state; None if it does."""
        if self.segment.generation < newest.went_back:
            return f"of before everybody went back in generation {newest.went_back}"
        if self.segment.generation < newest.progress_generation and self.step < newest.step:
            # It did not die in the step after, as one of that generation may have: others trained without it.
            return f"left behind at step {self.step} while others went on"
        if newest.has_replaced(self.segment.old_world_size, self.segment.old_rank, self.segment.generation):
            return "replaced by rows of a save, in a generation that came after it"
        if self.step < newest.step - 1:
            return f"left behind at step {self.step} while others went on"
        return None

    def was_interrupted(self, newest: Slot) -> bool:
        """Whether rows began to change after the newest step, and that slot does not account for it yet.

        It does if it was written by a later generation, which has seen the mark.
        """
        return self.segment.update_begun > newest.step and self.segment.generation >= newest.generation

    def held(self) -> Iterator[Held]:
        """Its shards, numbered through all segments of their holder."""
        first = sum(len(each.shards) for each in self.report.segments[: self.at])
        for index, shard in enumerate(self.segment.shards, first):
            yield Held(
                rank=self.report.rank,
                index=index,
                extent=shard.extent,
                step=self.step,
                generation=self.segment.generation,
            )


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


def _best_of_each_rank(current: Sequence[_Found], old_world_size: int) -> dict[int, _Found]:
    """Of the generation before, by its ranks."""
    found: dict[int, _Found] = {}
    for each in sorted(current, key=lambda each: each.age):
        if each.segment.old_world_size == old_world_size:
            found[each.segment.old_rank] = each
    return found


def _endings(best: Mapping[int, _Found], old_world_size: int) -> tuple[Ending, ...]:
    endings = [
        Ending(
            rank=rank,
            pid=best[rank].segment.pid if rank in best else None,
            host=best[rank].report.host if rank in best else None,
            why=(best[rank].segment.reason or NO_LAST_WORD) if rank in best else MEMORY_GONE,
            left_ns=max(0, best[rank].segment.left_ns) or None if rank in best else None,
        )
        for rank in range(old_world_size)
    ]
    return tuple(sorted(endings, key=lambda each: (each.left_ns or 0, each.rank)))


def _objection(reports: Sequence[WorkerReport], current: Sequence[_Found]) -> str | None:
    """Shards of one table that cannot be of the same model."""
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
    everything: Sequence[_Found],
    newest: Slot | None,
    stale: Mapping[tuple[int, int], str],
) -> Iterator[str]:
    for report in reports:
        yield from report.refused
    for each in everything:
        whose = f"memory of old rank {each.segment.old_rank} on {each.report.host}"
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
