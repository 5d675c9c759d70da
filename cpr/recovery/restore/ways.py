"""Ways that are open after a failure, with their prices; all ranks find the same ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from cpr.checkpoint.catalog.resolve import on_rank_0
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError
from cpr.estimator.history import read_history
from cpr.recovery.decide.assessment import Assessment, Decision
from cpr.recovery.restore.pls_budget import Cost, PlsBudget
from cpr.recovery.restore.transfer import ShardSources, lost_share, plan_sources
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery, Way

USUAL_BYTES_PER_S: Final = 1.2e9
"""Bytes of rows that a worker loads in a second, until a recovery of the run has measured it: a load of
2.64 GB, with cold files on a local disk, took 2.1 s (median in `experiments/results/checkpointing.json`)."""
LEAST_BYTES: Final = 10**6
"""Bytes that a worker must have brought into place for its time to tell a rate."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes of rows that a worker brings into place in a second."""

    load: float = USUAL_BYTES_PER_S
    """Out of the checkpoint."""
    move: float = USUAL_BYTES_PER_S
    """Out of surviving memory, its own or another worker's."""

    @classmethod
    def measured(cls, recoveries: Sequence[Recovery]) -> Self:
        """Rates of the newest of these recoveries that know them."""
        loads = [each.load_bytes_per_s for each in recoveries if each.load_bytes_per_s]
        moves = [each.move_bytes_per_s for each in recoveries if each.move_bytes_per_s]
        return cls(load=(loads or [USUAL_BYTES_PER_S])[-1], move=(moves or [USUAL_BYTES_PER_S])[-1])


@dataclass(frozen=True, kw_only=True)
class OpenWay:
    """A way to recover: what it does, and its price."""

    decision: Decision
    way: Way
    found: Assessment
    """What is used of the memory that is left."""
    plan: Sequence[ShardSources]
    """Where each row comes from, unless all workers go back."""
    cost: Cost = field(default_factory=Cost)


class Ways:
    """Finds and prices the ways that are open after a failure; the progress is that of its moment."""

    def __init__(self, budget: PlsBudget, progress: RunProgress) -> None:
        self._budget, self._progress = budget, progress

    def find(
        self, live: Decision, found: Assessment, plan: Sequence[ShardSources], save_step: int | None
    ) -> list[OpenWay]:
        """All ways, in order of preference. Called by all ranks.

        Args:
            live: kind of recovery that uses all memory that is left, and the reason for it.
            found: what is left.
            plan: of all rows, for `live`.
            save_step: training steps done in the newest save; None: nothing was saved.
        """
        ways = [self.keep_live(live, found, plan, save_step)]
        if live.kind == "process":  # nothing is lost, and there is nothing to go back for
            return ways
        if found.mirrored and save_step is not None:
            bare = without_mirrors(found)
            rest = plan_sources(bare.needed, bare.held)
            reason = f"{lost_share(rest):.1%} of the tables come from the checkpoint"
            ways.append(self.keep_live(Decision("partial", reason), bare, rest, save_step))
        return [*ways, self.go_back(found, plan, save_step)]

    def keep_live(
        self, decision: Decision, found: Assessment, plan: Sequence[ShardSources], save_step: int | None
    ) -> OpenWay:
        """Keep what is live, and take lost rows from mirrors and from the save of a step."""
        is_lossy, rates = any(each.lost_rows for each in plan), self._rates
        cost = self._budget.cost_of_loss(found, plan, save_step if is_lossy else None)
        total = self._progress.pls_total
        seconds = (lost / rates.load + moved / rates.move for lost, moved, _ in row_bytes(plan).values())
        names = [*["mirror"] * bool(found.mirrored), *["checkpoint rows"] * is_lossy]
        way = Way(
            name=", ".join(names) or "in place",
            rows_s=max(seconds, default=0.0),
            lost=cost.lost,
            lost_share=lost_share(plan),
            pls_added=cost.pls,
            pls=None if total is None or cost.pls is None else total + cost.pls,
        )
        return OpenWay(decision=decision, way=way, found=found, plan=plan, cost=cost)

    def go_back(self, found: Assessment, plan: Sequence[ShardSources], save_step: int | None) -> OpenWay:
        """Go back on all ranks to the save of a step, or to the beginning. Called by all ranks."""
        seconds = (total / self._rates.load for _, _, total in row_bytes(plan).values())
        way = self._budget.way_back(max(seconds, default=0.0), save_step)
        return OpenWay(decision=Decision("full", ""), way=way, found=found, plan=plan)

    @property
    def _rates(self) -> Rates:
        return Rates.measured(self._progress.recoveries)


def without_mirrors(found: Assessment) -> Assessment:
    """The same, as if no mirrors were left."""
    held = tuple(each for each in found.held if not each.is_mirror)
    return replace(found, mirrored={}, held=held, chosen=())


def row_bytes(plan: Sequence[ShardSources]) -> dict[int, tuple[int, int, int]]:
    """Bytes of each rank's rows, optimizer state included: lost, copied from memory, and all."""
    found: dict[int, tuple[int, int, int]] = {}
    for each in plan:
        size, before = each.needed.bytes_per_row, found.get(each.needed.rank, (0, 0, 0))
        rows = (each.lost_rows, each.moved_rows, each.needed.extent.num_rows)
        lost, moved, total = (count * size + old for count, old in zip(rows, before, strict=True))
        found[each.needed.rank] = (lost, moved, total)
    return found


def slowest_rate(num_bytes: Mapping[int, int], seconds: Sequence[float]) -> float | None:
    """Bytes a second of the slowest rank, among those that had enough to do; None: no rank had.

    Args:
        num_bytes: that each rank brought into place.
        seconds: that it took, of all ranks in order; 0: it did nothing of the kind.
    """
    rates = [
        size / seconds[rank] for rank, size in num_bytes.items() if size >= LEAST_BYTES and seconds[rank]
    ]
    return min(rates, default=None)


def seconds_per_sample(group: RankGroup, storage: Storage) -> float | None:
    """Seconds in which the run trains a sample, as it has measured; None: unknown. Called by all ranks."""

    def read() -> float | None:
        try:
            history = read_history(storage)
        except (CheckpointError, OSError, ValueError):  # training continues without it
            return None
        if history is None or not history.step_s or not history.samples_done:
            return None
        return history.step_s * history.steps_done / history.samples_done

    return on_rank_0(group, read)
