"""Progress and failures of a run, kept in memory with the model and in checkpoints; equal on all ranks."""

import json
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Final

from cpr.errors import NoProgressError
from cpr.recovery.run.report import Ending, Recovery

SAVES_KEPT: Final = 32


@dataclass(frozen=True)
class Charge:
    """Samples that a worker's shards have lost. They are remembered, because none can be lost twice."""

    world_size: int
    """World size of the generation whose ranks are counted."""
    rank: int
    share: float
    """Share of the worker's shards."""
    begin: int
    """Samples done at the save that the rows came from."""
    end: int
    """Samples done when the rows were lost."""
    generation: int = -1
    """Generation that loaded the rows; older memory of them must not come back. -1: unknown."""


def losses_in(progress: Mapping[str, Any]) -> tuple[tuple[int, int, int], ...]:
    """World size, rank and generation of workers whose rows came from a save, from a saved `RunProgress`."""
    charges = (Charge(*each) for each in progress["charges"])
    return tuple((each.world_size, each.rank, each.generation) for each in charges)


class RunProgress:
    """How far a run is, which saves it made, and which failures it went through."""

    def __init__(self) -> None:
        self.steps_done = 0
        self.samples_done = 0
        """Samples trained in these steps, by all ranks together."""
        self.batches_done = 0
        """Batches trained or skipped up to the position of the registered states; without `to_skip`."""
        self.to_skip = 0
        """Batches after that position whose training was interrupted and which were not skipped yet."""
        self.pls_total: float | None = 0.0
        self.charges: tuple[Charge, ...] = ()
        """The newest losses that `pls_total` contains."""
        self.generation = 0
        """Generation of the workers that wrote this."""
        self.progress_generation = -1
        """The last generation that finished a step."""
        self.went_back = -1
        """The last generation that loaded a checkpoint on all ranks."""
        self.saves: dict[int, int] = {}
        """Samples done at the newest saves that hold every row, or count as such, by step."""
        self.row_saves: list[int] = []
        """Steps of the saves of some rows, as far back as the second newest step in `saves`."""
        self._fruitless: list[str] = []
        self._recoveries: list[Recovery] = []
        # As one leaf of bytes: written after each step, and copied only where the object has changed.
        self._recoveries_json = b"[]"

    @property
    def recoveries(self) -> list[Recovery]:
        """Reports of how each generation of workers started, oldest first."""
        return list(self._recoveries)

    @recoveries.setter
    def recoveries(self, recoveries: list[Recovery]) -> None:
        self._recoveries = list(recoveries)
        self._recoveries_json = json.dumps([each.to_dict() for each in recoveries]).encode()

    @property
    def newest_stories(self) -> list[Recovery]:
        """The report of this generation, after those of attempts that died since the last one trained."""
        stories = self._recoveries[-1:]
        for each in reversed(self._recoveries[:-1]):
            if each.finished:
                break
            stories.insert(0, each)
        return stories

    def step(self, samples: int) -> None:
        """Count a finished training step."""
        self.steps_done += 1
        self.samples_done += samples
        self.batches_done += 1 + self.to_skip
        self.to_skip = 0
        self.progress_generation = self.generation
        self._fruitless = []

    def note_skipped(self) -> None:
        """Count a skipped batch: the registered states are past it now.

        Raises:
            ValueError: there is no batch to skip.
        """
        if self.to_skip == 0:
            raise ValueError("no batch is to be skipped; leave out as many as batches_to_skip says")
        self.to_skip -= 1
        self.batches_done += 1

    def start_over(self) -> None:
        """Go back to the beginning of training; the reports of recoveries stay."""
        self.went_back = self.generation
        self.steps_done = self.samples_done = self.batches_done = self.to_skip = 0
        self.pls_total, self.charges = 0.0, ()
        self.saves, self.row_saves = {}, []

    def add_pls(self, added: float | None, charges: Collection[Charge] = ()) -> None:
        """Add lost samples; None: unknown, and so is the total from now on.

        Workers that die before this recovery is over lose the same samples again, and the next generation
        knows by the charges that they count already.
        """
        self.pls_total = None if added is None or self.pls_total is None else self.pls_total + added
        sizes = {each.world_size for each in charges}
        charged = {(each.world_size, each.rank) for each in charges}
        known = [each for each in self.charges if each.world_size in sizes]
        self.charges = (
            *(each for each in known if (each.world_size, each.rank) not in charged),
            *charges,
        )

    def note_seconds(self, seconds: dict[str, float]) -> Recovery:
        """Put the seconds of each phase into the newest report, and return it."""
        *older, newest = self._recoveries
        newest = replace(newest, seconds=dict(seconds))
        self.recoveries = [*older, newest]
        return newest

    def note_save(self) -> None:
        """Count a save that holds every row as of about now, or counts as such."""
        self.saves[self.steps_done] = self.samples_done
        for step in sorted(self.saves)[:-SAVES_KEPT]:
            del self.saves[step]

    def note_row_save(self) -> None:
        """Count a save of some rows."""
        remembered = sorted(self.saves)[-2:]  # the newest may turn out to have failed
        since = remembered[0] if remembered else 0
        self.row_saves = [*(step for step in self.row_saves if step > since), self.steps_done]

    @property
    def row_saves_since(self) -> int:
        """Number of row saves after the newest save that counts as a whole table."""
        newest = max(self.saves, default=0)
        return sum(step > newest for step in self.row_saves)

    def forget_save(self, step: int) -> None:
        """Forget the save that began after this step, because it failed."""
        self.saves.pop(step, None)
        self.row_saves = [each for each in self.row_saves if each != step]

    def forget_saves_after(self, step: int) -> None:
        """Forget saves that began later: their workers died before these were committed."""
        for later in [each for each in (*self.saves, *self.row_saves) if each > step]:
            self.forget_save(later)

    def samples_at(self, step: int) -> int:
        """Samples done at a save; for an unknown save, rather too few than too many.

        Before the oldest known save, each step counts as many samples as those up to it did on average.
        """
        if older := [each for each in self.saves if each <= step]:
            return self.saves[max(older)]
        known = {self.steps_done: self.samples_done, **self.saves}
        oldest = min(known)
        if oldest <= step:  # no save is known
            return known[oldest]
        return known[oldest] * step // oldest

    @property
    def samples_between_saves(self) -> float | None:
        """Mean over the newest saves that count; None: fewer than two are known."""
        if len(self.saves) < 2:
            return None
        samples = sorted(self.saves.values())
        return (samples[-1] - samples[0]) / (len(samples) - 1)

    def begin(
        self, generation: int, endings: tuple[Ending, ...], interrupted: bool, max_without_progress: int
    ) -> None:
        """Start a new generation from the progress that the previous one left.

        Raises:
            NoProgressError: `max_without_progress` generations in a row have ended without finishing a step.
        """
        without_progress = generation - 1 - self.progress_generation
        if without_progress > 0:
            causes = "; ".join(map(str, endings)) or "cause unknown"
            self._fruitless.append(f"generation {generation - 1} ended: {causes}")
        self.generation = generation
        self.to_skip += interrupted
        if without_progress >= max_without_progress:
            causes = "\n  ".join(self._fruitless)
            raise NoProgressError(
                f"{without_progress} generations of workers in a row ended without finishing step "
                f"{self.steps_done + 1}\n  {causes}\nRestarts cannot help: stop the launcher, and look into "
                "the causes above; the memory of the run is kept until then, and the newest checkpoint stays"
            )

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        names = ("steps_done", "samples_done", "batches_done", "to_skip", "pls_total", "generation")
        return {
            **{name: getattr(self, name) for name in names},
            "progress_generation": self.progress_generation,
            "went_back": self.went_back,
            "charges": [list(astuple(each)) for each in self.charges],
            "saves": dict(self.saves),
            "row_saves": list(self.row_saves),
            "fruitless": list(self._fruitless),
            "recoveries": self._recoveries_json,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to saved progress; reports of later recoveries, and the generation, stay."""
        for name in ("steps_done", "samples_done", "batches_done", "to_skip", "pls_total"):
            setattr(self, name, state[name])
        self.saves = dict(state["saves"])
        self.row_saves = list(state.get("row_saves", ()))  # absent in older checkpoints
        self.charges = tuple(Charge(*each) for each in state["charges"])
        stored = [Recovery.from_dict(each) for each in json.loads(state["recoveries"])]
        if len(stored) > len(self._recoveries):
            self.recoveries = stored

    def take_over(self, state: dict[str, Any]) -> None:
        """Continue with the progress that the previous generation left in memory."""
        self.load_state_dict(state)
        self.generation = state["generation"]
        self.progress_generation = state["progress_generation"]
        self.went_back = state["went_back"]
        self._fruitless = list(state["fruitless"])
