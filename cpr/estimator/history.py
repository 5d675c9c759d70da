"""What a run has measured of its saves and failures: `history-<epoch>.json` in its checkpoint directory.

The run writes it as it goes, through all generations of its workers, and reads it back when it goes on.
`cpr plan --run DIR` takes the estimator's inputs from it, so that nobody has to guess them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from cpr.errors import CorruptFileError
from cpr.strict_json import parse

if TYPE_CHECKING:
    from cpr.checkpoint.storage.base import Storage

HISTORY_PATH: Final = "history.json"
"""In a directory without epochs of owners; else each has a file of its own, see `history_path`."""
_NAME: Final = re.compile(r"history(?:-([0-9]{1,18}))?\.json")
FORMAT: Final = "cpr-history"
VERSION: Final = 1
SAVES_KEPT: Final = 256
"""Newest saves of each kind in a history; failures are all kept."""
SAVES_LOOKED_AT: Final = 16
"""Newest saves that tell whether a run saves rows; one that does saves everything now and then, too."""
SAVES_FOLLOWED: Final = 15
"""Newest saves that tell what saves cost now: when more than half of them are slow, so is the storage."""
SHORTEST_GAP_S: Final = 1.0
LOADING: Final = ("reattach", "restore")
"""Phases of a recovery (`cpr.recovery.run.phases`) that are the paper's `O_load`; others are `O_res`."""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one committed save took."""

    step: int
    """Training steps done when it began."""
    kind: Literal["base", "rows"]
    num_bytes: int
    blocked_s: float
    """That training waited for it, on the rank where it waited longest."""
    seconds: float
    """From its beginning until it was committed."""
    share: float = 1.0
    """Of the rows of prioritised tables that it was to hold: 1 for a base, r for priority saves."""
    slowed_s: float | None = None
    """How much longer than others the steps beside it took, besides `blocked_s`. It is noisy and may be
    negative: only the median over saves says something. None: not known, as no step was beside it."""

    @property
    def cost_s(self) -> float | None:
        """That it cost training, as steps beside it show; None: not known."""
        return None if self.slowed_s is None else self.blocked_s + self.slowed_s

    @property
    def of_everything(self) -> Self:
        """What a save of everything would have cost, in proportion."""
        return replace(
            self,
            num_bytes=round(self.num_bytes / self.share),
            blocked_s=self.blocked_s / self.share,
            seconds=self.seconds / self.share,
            share=1.0,
            slowed_s=None if self.slowed_s is None else self.slowed_s / self.share,
        )


@dataclass(frozen=True, kw_only=True)
class TypicalSave:
    """What a save of a run takes: the median of many, for what one seems to cost is noise as well."""

    seconds: float
    """From its beginning until it was committed."""
    blocked_s: float
    """That it costs training: what that waits, and how much longer steps beside it take."""
    share: float
    """Of the rows, that it holds."""


@dataclass(frozen=True, kw_only=True)
class FailureCost:
    """A failure, and what it took to go on."""

    elapsed_s: float
    """Of the run, when its workers ended: on the clock of `RunHistory.elapsed_s`."""
    kind: Literal["process", "partial", "full"]
    """How it was recovered from: see `cpr.recovery.decide.decision`."""
    lost_share: float
    """Of the sharded tables, from 0 to 1: what had to come from the checkpoint, or would have had to."""
    nodes_lost: float
    """Nodes' worth of tables that were lost: lost_share x nodes if all hold as much. Full recovery does not
    change that: it loses no samples, but the nodes were lost."""
    seconds: Mapping[str, float]
    """By phase, see `cpr.recovery.run.phases`."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """What a run has measured so far; derived values are the inputs of `cpr.estimator.planning.formulas`."""

    world_size: int
    nodes: int
    """Failure domains: the paper's `N_emb`."""
    step_s: float
    """A training step takes while no save is under way."""
    steps_done: int
    samples_done: int
    samples_total: int | None
    """Of the whole run; None: not known."""
    elapsed_s: float
    """That workers were at it or were being replaced, in all generations; pauses of the run are not in it."""
    clock_s: float = 0.0
    """`time.time()` at that moment: from it the next generation knows how long ago this was written."""
    saves: Sequence[SaveCost] = ()
    """The newest `SAVES_KEPT` of each kind, oldest first."""
    failures: Sequence[FailureCost] = field(default=())
    """Oldest first."""

    def with_save(self, save: SaveCost) -> Self:
        """With one more save."""
        return replace(self, saves=newest_saves((*self.saves, save), SAVES_KEPT))

    def with_failure(self, failure: FailureCost) -> Self:
        """With one more failure."""
        return replace(self, failures=(*self.failures, failure))

    @property
    def lately(self) -> Self:
        """The same with the newest `SAVES_FOLLOWED` saves alone, which tell what storage is like now."""
        return replace(self, saves=self.saves[-SAVES_FOLLOWED:])

    @property
    def T_total(self) -> float | None:  # noqa: N802
        """Useful training time of the whole run, seconds; None: not known."""
        if not self.samples_total or not self.samples_done:
            return None
        return self.step_s * self.steps_done * self.samples_total / self.samples_done

    @property
    def O_save(self) -> float | None:  # noqa: N802
        """Until a save of everything is stored, seconds. None: there was none."""
        return None if self.whole_save is None else self.whole_save.seconds

    @property
    def O_blocked(self) -> float | None:  # noqa: N802
        """That a save of everything costs training, seconds: what it waits, and how much longer steps take.

        None: there was no save.
        """
        return None if self.whole_save is None else self.whole_save.blocked_s

    @property
    def whole_save(self) -> TypicalSave | None:
        """A save of everything; where only rows were saved, what those add up to. None: nothing was saved."""
        bases = [save for save in self.saves if save.kind == "base"]
        return _typical(bases or [save.of_everything for save in self.saves])

    @property
    def row_save(self) -> TypicalSave | None:
        """A save of some rows. None: the run does not make them."""
        if all(save.kind == "base" for save in self.saves[-SAVES_LOOKED_AT:]):
            return None
        return _typical([save for save in self.saves if save.kind == "rows"])

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
        for save in self.saves:
            if save.kind not in ("base", "rows"):
                raise ValueError(f"a history with a save of kind {save.kind!r}")
            if save.slowed_s is not None:
                _check_number("slowed_s", save.slowed_s, least=-math.inf)
        for failure in self.failures:
            for phase, seconds in failure.seconds.items():
                _check_number(phase, seconds)

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
    from cpr.checkpoint.storage.base import read_file  # noqa: PLC0415 - brings pyarrow, which formulas do without

    path = history_path(max(_epochs(storage), default=0))
    try:
        text = read_file(storage, path)
    except CorruptFileError:
        return None
    try:
        return RunHistory.from_json(parse(text))
    except (ValueError, OverflowError) as error:  # of numbers beyond all floats
        raise ValueError(f"{storage.uri}/{path} is {error}") from error


def write_history(storage: "Storage", history: RunHistory, epoch: int = 0) -> None:
    """Put it in the place of what was there, atomically.

    What an owner of an older epoch still has on its way replaces nothing: its file is another.

    Args:
        storage: the checkpoint directory.
        history: of the run.
        epoch: of the owner of the directory.

    Raises:
        CheckpointError: the storage fails.
    """
    with storage.create(history_path(epoch)) as sink:
        sink.write(memoryview(json.dumps(history.to_json(), indent=1).encode()))
    for older in _epochs(storage):
        if older < epoch:
            storage.delete(history_path(older))


def history_path(epoch: int) -> str:
    """Of the history that the owner of an epoch writes; the one of the highest epoch counts."""
    return f"history-{epoch}.json" if epoch else HISTORY_PATH


def _epochs(storage: "Storage") -> list[int]:
    """Of the owners whose histories are there."""
    return [int(match[1] or 0) for match in map(_NAME.fullmatch, storage.list()) if match]


def _known(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass that are in `data`; numbers among them are checked."""
    known = {each.name: data[each.name] for each in fields(cls) if each.name in data}
    for each in fields(cls):
        if each.type in (int, float) and each.name in known:
            _check_number(each.name, known[each.name])
    return known


def _check_number(name: str, value: Any, least: float = 0.0) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        sign = ", 0 or more and" if least == 0 else " and"
        raise ValueError(f"a history whose {name} is {value!r}; it must be a number{sign} finite")


def newest_saves(saves: Iterable[SaveCost], number: int) -> tuple[SaveCost, ...]:
    """The newest of each kind: many row saves do not make one forget what a base costs.

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


def _typical(saves: Sequence[SaveCost]) -> TypicalSave | None:
    """One of these saves; it costs what steps show, but never less than what training waited."""
    if not saves:
        return None
    waited_s = median(save.blocked_s for save in saves)
    costs_s = [save.cost_s for save in saves if save.cost_s is not None]
    return TypicalSave(
        seconds=median(save.seconds for save in saves),
        blocked_s=max(waited_s, median(costs_s)) if costs_s else waited_s,
        share=median(save.share for save in saves),
    )


def _mean(values: Any) -> float | None:
    values = list(values)
    return fmean(values) if values else None
