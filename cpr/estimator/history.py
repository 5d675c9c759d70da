"""Measured costs of a run's saves and failures: `history-<epoch>.json` in its checkpoint directory.

The run updates the file through all generations of its workers and reads it back when it resumes.
`cpr plan --run DIR` takes the estimator's inputs from it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

from cpr.errors import CorruptFileError
from cpr.strict_json import build, parse

if TYPE_CHECKING:
    from cpr.checkpoint.storage.base import Storage

HISTORY_PATH: Final = "history.json"
"""File name in a directory without ownership epochs; otherwise see `history_path`."""
_NAME: Final = re.compile(r"history(?:-([0-9]{1,18}))?\.json")
FORMAT: Final = "cpr-history"
VERSION: Final = 1
SAVES_KEPT: Final = 256
"""Newest saves of each kind in a history; all failures are kept."""
SAVES_LOOKED_AT: Final = 16
"""Newest saves that decide whether a run makes row saves; such a run makes full saves now and then, too."""
SAVES_FOLLOWED: Final = 15
"""Newest saves that represent the present storage: when more than half of them are slow, storage is slow."""
SHORTEST_GAP_S: Final = 1.0
DEAD_KEPT: Final = 4
"""Workers whose ends a failure lists: one failure ends all of them, most only because another one is gone."""
LOADING: Final = ("reattach", "restore")
"""Phases of a recovery (`cpr.recovery.run.report`) that are the paper's `O_load`; the others are `O_res`."""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """Cost of one committed save."""

    ignores_unknown: ClassVar = True
    step: int
    """Training steps done when the save began."""
    kind: Literal["base", "rows"]
    num_bytes: int
    blocked_s: float
    """Seconds that training waited, on the rank that waited longest."""
    seconds: float
    """From the start of the save to its commit."""
    share: float = 1.0
    """Share of the rows of prioritised tables in the save: 1 for a full save, r for a row save."""
    slowed_s: int | float | None = None
    """Seconds by which steps during the save took longer than other steps, besides `blocked_s`. Noisy, may be
    negative: use the median over saves. None if no step ran during the save."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; a save has a share of the rows, above 0 and at most 1")

    @property
    def cost_s(self) -> float | None:
        """Seconds of training lost, measured by steps; None if not known."""
        return None if self.slowed_s is None else self.blocked_s + self.slowed_s

    @property
    def of_everything(self) -> Self:
        """Cost of a full save, extrapolated in proportion to `share`."""
        return replace(
            self,
            num_bytes=round(self.num_bytes / self.share),
            blocked_s=self.blocked_s / self.share,
            seconds=self.seconds / self.share,
            share=1.0,
            slowed_s=None if self.slowed_s is None else self.slowed_s / self.share,
        )


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """A save that has begun or failed; `SaveCost` is one that is committed."""

    step: int
    """Training steps done when that happened."""
    blocked_s: float = 0.0
    """Seconds that training on this rank waited until the save had begun, also for the save before it."""
    failure: str = ""
    """Why the save failed; empty: it has begun."""


@dataclass(frozen=True, kw_only=True)
class TypicalSave:
    """Median cost of many saves, since the measured cost of a single save is noisy."""

    seconds: float
    """From the start of the save to its commit."""
    blocked_s: float
    """Seconds of training lost: waiting, and slower steps during the save."""
    share: float
    """Share of the rows in the save."""


@dataclass(frozen=True, kw_only=True)
class FailureCost:
    """Cost of one failure."""

    ignores_unknown: ClassVar = True
    elapsed_s: float
    """Time of the failure on the clock of `RunHistory.elapsed_s`, seconds."""
    kind: Literal["process", "mirror", "partial", "full"]
    """Kind of recovery: see `cpr.recovery.run.report`."""
    lost_share: float
    """Share of the sharded tables, from 0 to 1, whose memory was lost."""
    nodes_lost: float
    """Lost nodes' worth of tables: lost_share x nodes if all hold as much. Also counted for full recovery,
    which loses no samples but has lost the nodes."""
    seconds: Mapping[str, float]
    """Duration by phase, see `cpr.recovery.run.report`."""
    step: int | None = None
    """Training steps done after the recovery; None: not recorded."""
    reason: str = ""
    """Why the run recovered in this way."""
    dead: Sequence[str] = ()
    """How workers ended, at most `DEAD_KEPT`: first those that were killed or lost their memory."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of all tables by origin, see `cpr.recovery.run.report.RowOrigin`; empty: not recorded, or all of
    them came from the checkpoint."""
    pls_added: int | float | None = None
    """PLS added by the failure; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """All measurements of a run; properties derive the inputs of `cpr.estimator.planning.formulas`."""

    ignores_unknown: ClassVar = True
    world_size: int
    nodes: int
    """Failure domains: the paper's `N_emb`."""
    step_s: float
    """Seconds per training step while no save runs."""
    steps_done: int
    samples_done: int
    samples_total: int | None
    """Samples of the whole run; None if not known."""
    elapsed_s: float
    """Seconds in which workers trained or were being replaced, over all generations, without pauses."""
    clock_s: float = 0.0
    """`time.time()` of this measurement, from which the next generation computes its age."""
    pls: int | float | None = None
    """Portion of lost samples so far; None: unknown."""
    saves: Sequence[SaveCost] = ()
    """The newest `SAVES_KEPT` of each kind, oldest first."""
    failed_saves: int = 0
    """Number of saves that failed."""
    failures: Sequence[FailureCost] = ()
    """Oldest first."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes is {self.nodes}; a run has 1 at least")

    def with_save(self, save: SaveCost) -> Self:
        """The history with one more save."""
        return replace(self, saves=newest_saves((*self.saves, save), SAVES_KEPT))

    def with_failure(self, failure: FailureCost) -> Self:
        """The history with one more failure."""
        return replace(self, failures=(*self.failures, failure))

    @property
    def lately(self) -> Self:
        """The history reduced to its newest `SAVES_FOLLOWED` saves, which represent the present storage."""
        return replace(self, saves=self.saves[-SAVES_FOLLOWED:])

    @property
    def T_total(self) -> float | None:  # noqa: N802
        """Useful training time of the whole run, seconds; None if not known."""
        if not self.samples_total or not self.samples_done:
            return None
        return self.step_s * self.steps_done * self.samples_total / self.samples_done

    @property
    def O_save(self) -> float | None:  # noqa: N802
        """Seconds until a full save is stored; None without saves."""
        return None if self.whole_save is None else self.whole_save.seconds

    @property
    def O_blocked(self) -> float | None:  # noqa: N802
        """Seconds of training lost by a full save; None without saves."""
        return None if self.whole_save is None else self.whole_save.blocked_s

    @property
    def whole_save(self) -> TypicalSave | None:
        """Cost of a full save, extrapolated from row saves if there are only those; None without saves."""
        bases = [save for save in self.saves if save.kind == "base"]
        return _typical(bases or [save.of_everything for save in self.saves])

    @property
    def row_save(self) -> TypicalSave | None:
        """Cost of a row save; None if the run does not make row saves."""
        if all(save.kind == "base" for save in self.saves[-SAVES_LOOKED_AT:]):
            return None
        return _typical([save for save in self.saves if save.kind == "rows"])

    @property
    def O_load(self) -> float | None:  # noqa: N802
        """Mean seconds per failure to find and load lost state; None without failures."""
        return _mean(sum(each.seconds.get(phase, 0.0) for phase in LOADING) for each in self.failures)

    @property
    def O_res(self) -> float | None:  # noqa: N802
        """Mean seconds per failure from death to the next step, without `O_load`; None without failures."""
        return _mean(self._rescheduling_s(each) for each in self.failures)

    @property
    def nodes_lost(self) -> float | None:
        """Mean nodes' worth of tables lost per failure; None without failures."""
        return _mean(each.nodes_lost for each in self.failures)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each failure to the next, the first from the start of the run."""
        times = [0.0, *(each.elapsed_s for each in self.failures)]
        # failures during a recovery are recorded together when the recovery ends: keep them apart
        return [max(SHORTEST_GAP_S, later - earlier) for earlier, later in pairwise(times)]

    @property
    def unfinished_gap_s(self) -> float:
        """Seconds since the last failure or the start of the run: a lower bound of the next gap."""
        return max(0.0, self.elapsed_s - (self.failures[-1].elapsed_s if self.failures else 0.0))

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """A history from the content of a file; unknown fields are ignored.

        Raises:
            ValueError: the content is not a history.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ValueError(f"it is not a history of version {VERSION} of this program")
        return build(cls, data)

    def _rescheduling_s(self, failure: FailureCost) -> float:
        others = {phase: spent_s for phase, spent_s in failure.seconds.items() if phase not in LOADING}
        if "first_step" in others:
            others["first_step"] = max(0.0, others["first_step"] - self.step_s)  # that much is training
        return sum(others.values())


def read_history(storage: "Storage") -> RunHistory | None:
    """Read the history of a run; None if there is none.

    Raises:
        ValueError: the file is not a history; the message names the file.
        CheckpointError: the storage fails.
    """
    from cpr.checkpoint.storage.base import read_file  # noqa: PLC0415 - imports pyarrow, which formulas avoid

    path = history_path(max(_epochs(storage), default=0))
    try:
        text = read_file(storage, path)
    except CorruptFileError:
        return None
    try:
        return RunHistory.from_json(parse(text))
    except ValueError as error:
        raise ValueError(f"{storage.uri}/{path} is no history: {error}") from error


def write_history(storage: "Storage", history: RunHistory, epoch: int = 0) -> None:
    """Write the history of a run atomically, in place of an older one.

    Args:
        storage: the checkpoint directory.
        history: of the run.
        epoch: of the directory's owner. Each epoch has a file of its own, so that a delayed write of a
            replaced owner replaces nothing.

    Raises:
        CheckpointError: the storage fails.
    """
    with storage.create(history_path(epoch)) as sink:
        sink.write(memoryview(json.dumps(history.to_json(), indent=1).encode()))
    for older in _epochs(storage):
        if older < epoch:
            storage.delete(history_path(older))


def history_path(epoch: int) -> str:
    """File name of the history that the owner of an epoch writes; the highest epoch counts."""
    return f"history-{epoch}.json" if epoch else HISTORY_PATH


def newest_saves(saves: Iterable[SaveCost], number: int) -> tuple[SaveCost, ...]:
    """The newest saves of each kind, so that many row saves do not displace the last full save.

    Args:
        saves: oldest first.
        number: of each kind, at most.
    """
    found: Counter[str] = Counter()
    kept = []
    for save in reversed(list(saves)):
        found[save.kind] += 1
        if found[save.kind] <= number:
            kept.append(save)
    return tuple(reversed(kept))


def _epochs(storage: "Storage") -> list[int]:
    return [int(match[1] or 0) for match in map(_NAME.fullmatch, storage.list()) if match]


def _typical(saves: Sequence[SaveCost]) -> TypicalSave | None:
    if not saves:
        return None
    waited_s = median(save.blocked_s for save in saves)
    costs_s = [save.cost_s for save in saves if save.cost_s is not None]
    return TypicalSave(
        seconds=median(save.seconds for save in saves),
        blocked_s=max(waited_s, median(costs_s)) if costs_s else waited_s,  # noise must not hide the wait
        share=median(save.share for save in saves),
    )


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return fmean(values) if values else None
