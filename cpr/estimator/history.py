"""What a run has measured of its saves and failures: `history.json` in its checkpoint directory.

The run writes it as it goes, through all generations of its workers, and reads it back when it goes on.
`cpr plan --run DIR` takes the estimator's inputs from it, so that nobody has to guess them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from cpr.errors import CorruptFileError

if TYPE_CHECKING:
    from cpr.checkpoint.storage import Storage

HISTORY_PATH: Final = "history.json"
FORMAT: Final = "cpr-history"
VERSION: Final = 1
SAVES_KEPT: Final = 256
"""Newest saves in a history; failures are all kept."""
SAVES_LOOKED_AT: Final = 16
"""Newest saves that tell whether a run saves rows; one that does saves everything now and then, too."""
SHORTEST_GAP_S: Final = 1.0
LOADING: Final = ("reattach", "restore")
"""Phases of a recovery (`cpr.recovery.phases`) that are the paper's `O_load`; all others are its `O_res`."""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one committed save took."""

    step: int
    """Training steps done when it began."""
    kind: Literal["base", "rows"]
    num_bytes: int
    blocked_s: float
    """That training waited for it, on rank 0."""
    seconds: float
    """From its beginning until it was committed."""
    share: float = 1.0
    """Of the rows of prioritised tables that it was to hold: 1 for a base, r for priority saves. A save of
    everything would have cost 1 / share as much."""


@dataclass(frozen=True, kw_only=True)
class FailureCost:
    """A failure, and what it took to go on."""

    elapsed_s: float
    """Of the run, when its workers ended: on the clock of `RunHistory.elapsed_s`."""
    kind: Literal["process", "partial", "full"]
    """How it was recovered from: see `cpr.recovery.decision`."""
    lost_share: float
    """Of the sharded tables, from 0 to 1: what had to come from the checkpoint, or would have had to."""
    nodes_lost: float
    """Nodes' worth of tables that were lost: lost_share x nodes if all hold as much."""
    seconds: Mapping[str, float]
    """By phase, see `cpr.recovery.phases`."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What a run has measured so far; the derived values are the inputs of `cpr.estimator.formulas`."""

    world_size: int
    nodes: int
    """Failure domains: the paper's `N_emb`."""
    step_s: float
    """A training step takes, without saves."""
    steps_done: int
    samples_done: int
    samples_total: int | None
    """Of the whole run; None: not known."""
    elapsed_s: float
    """That workers were at it or were being replaced, in all generations; pauses of the run are not in it."""
    clock_s: float = 0.0
    """`time.time()` at that moment: from it the next generation knows how long ago this was written."""
    saves: Sequence[SaveCost] = ()
    """The newest `SAVES_KEPT`, oldest first."""
    failures: Sequence[FailureCost] = field(default=())
    """Oldest first."""

    def with_save(self, save: SaveCost) -> Self:
        """With one more save."""
        return replace(self, saves=(*self.saves, save)[-SAVES_KEPT:])

    def with_failure(self, failure: FailureCost) -> Self:
        """With one more failure."""
        return replace(self, failures=(*self.failures, failure))

    @property
    def T_total(self) -> float | None:  # noqa: N802
        """Useful training time of the whole run, seconds; None: not known."""
        if not self.samples_total or not self.samples_done:
            return None
        return self.step_s * self.steps_done * self.samples_total / self.samples_done

    @property
    def O_save(self) -> float | None:  # noqa: N802
        """Until a save of everything is stored, seconds: the median. None: there was none."""
        return _median(save.seconds / save.share for save in self._typical)

    @property
    def O_blocked(self) -> float | None:  # noqa: N802
        """That training waits for a save of everything, seconds: the median. None: there was none."""
        return _median(save.blocked_s / save.share for save in self._typical)

    @property
    def O_load(self) -> float | None:  # noqa: N802
        """To find and load what was lost, seconds a failure on average. None: there was no failure."""
        return _mean(sum(each.seconds.get(phase, 0.0) for phase in LOADING) for each in self.failures)

    @property
    def O_res(self) -> float | None:  # noqa: N802
        """Everything else from death to the next step, seconds a failure on average. None: no failure."""
        return _mean(self._rescheduling(each) for each in self.failures)

    @property
    def nodes_lost(self) -> float | None:
        """Nodes' worth of tables that a failure lost on average. None: there was no failure."""
        return _mean(each.nodes_lost for each in self.failures)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds from each failure to the next, the first from the beginning of the run.

        Failures in the middle of a recovery are told when that is over: they are `SHORTEST_GAP_S` apart.
        """
        times = [0.0, *(each.elapsed_s for each in self.failures)]
        return [max(SHORTEST_GAP_S, later - earlier) for earlier, later in pairwise(times)]

    @property
    def unfinished_gap_s(self) -> float:
        """Seconds since the last failure, or of the whole run: the next gap is longer than that."""
        return max(0.0, self.elapsed_s - (self.failures[-1].elapsed_s if self.failures else 0.0))

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave; fields that are not known are left alone.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ValueError(f"not a history of version {VERSION} of this program")
        try:
            known = _known(cls, data)
            known["saves"] = tuple(SaveCost(**_known(SaveCost, each)) for each in data["saves"])
            known["failures"] = tuple(FailureCost(**_known(FailureCost, each)) for each in data["failures"])
            found = cls(**known)
            found._check()
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"a history with something missing or out of place: {error}") from error
        return found

    def _check(self) -> None:
        """Refuse what would be divided by, and numbers in places that have no type of their own."""
        if self.nodes < 1 or not all(0 < save.share <= 1 for save in self.saves):
            raise ValueError("a history of a run without nodes, or with a save of no share of the rows")
        if self.samples_total is not None:
            _check_number("samples_total", self.samples_total)
        for failure in self.failures:
            for phase, seconds in failure.seconds.items():
                _check_number(phase, seconds)

    @property
    def _typical(self) -> list[SaveCost]:
        """Saves of the kind that comes again and again: of rows, if there are any among the newest."""
        kind = "rows" if any(save.kind == "rows" for save in self.saves[-SAVES_LOOKED_AT:]) else "base"
        return [save for save in self.saves if save.kind == kind]

    def _rescheduling(self, failure: FailureCost) -> float:
        others = {phase: spent_s for phase, spent_s in failure.seconds.items() if phase not in LOADING}
        if "first_step" in others:
            others["first_step"] = max(0.0, others["first_step"] - self.step_s)  # that much is training
        return sum(others.values())


def read_history(storage: "Storage") -> RunHistory | None:
    """What a run has measured; None: nothing is there.

    Raises:
        ValueError: the file is not a history; names it.
        CheckpointError: the storage fails.
    """
    from cpr.checkpoint.storage import read_file  # noqa: PLC0415 - brings pyarrow, which formulas do without

    try:
        text = read_file(storage, HISTORY_PATH)
    except CorruptFileError:
        return None
    try:
        return RunHistory.from_json(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{storage.uri}/{HISTORY_PATH} is {error}") from error


def write_history(storage: "Storage", history: RunHistory) -> None:
    """Put it in the place of what was there; whole, or not at all.

    Raises:
        CheckpointError: the storage fails.
    """
    with storage.create(HISTORY_PATH) as sink:
        sink.write(memoryview(json.dumps(history.to_json(), indent=1).encode()))


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that are in `data`; numbers among them are checked."""
    known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
    for each in fields(cls):
        if each.type in (int, float) and each.name in known:
            _check_number(each.name, known[each.name])
    return known


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ValueError(f"a history whose {name} is {value!r}; it must be a number, 0 or more and finite")


def _median(values: Any) -> float | None:
    values = list(values)
    return median(values) if values else None


def _mean(values: Any) -> float | None:
    values = list(values)
    return fmean(values) if values else None
