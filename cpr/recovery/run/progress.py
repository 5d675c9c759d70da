"""How far a run is, and what has happened to it: kept with the model, in memory and in checkpoints alike."""

import json
from collections.abc import Collection
from dataclasses import astuple, replace
from typing import Any, Final

from cpr.errors import NoProgressError
from cpr.recovery.run.pls import Charge
from cpr.recovery.run.policy import RecoveryPolicy
from cpr.recovery.run.report import Ending, Recovery

SAVES_KEPT: Final = 32


class RunProgress:
    """The course of a run; the same on all ranks."""

    def __init__(self) -> None:
        self.steps_done = 0
        self.samples_done = 0
        """Trained in these steps, by all ranks together."""
        self.batches_done = 0
        """Of the data, trained or skipped, up to the registered states; without `to_skip`."""
        self.to_skip = 0
        """Batches after that whose training was interrupted, and which nobody has left out yet."""
        self.pls_total: float | None = 0.0
        self.charges: tuple[Charge, ...] = ()
        """The newest losses that `pls_total` accounts for."""
        self.generation = 0
        """Of the workers that wrote this."""
        self.progress_generation = -1
        """The last generation that finished a step."""
        self.went_back = -1
        """The last generation that went back to a checkpoint, or began from one."""
        self.saves: dict[int, int] = {}
        """Samples done at the newest saves that hold every row, or count as if they did, by their step."""
        self.row_saves: list[int] = []
        """Steps of the saves of some rows, as far back as the last but one of those."""
        self._fruitless: list[str] = []
        self._recoveries: list[Recovery] = []
        self._recoveries_json = b"[]"  # many nodes, seldom changed: bytes, which are stored as they are

    @property
    def recoveries(self) -> list[Recovery]:
        """How each generation of workers began, oldest first."""
        return list(self._recoveries)

    @recoveries.setter
    def recoveries(self, recoveries: list[Recovery]) -> None:
        self._recoveries = list(recoveries)
        self._recoveries_json = json.dumps([each.to_dict() for each in recoveries]).encode()

    @property
    def newest_stories(self) -> list[Recovery]:
        """How this generation began, and before it the attempts of others since the last one that trained."""
        stories = self._recoveries[-1:]
        for each in reversed(self._recoveries[:-1]):
            if each.finished:
                break
            stories.insert(0, each)
        return stories

    def step(self, samples: int) -> None:
        """A step is complete."""
        self.steps_done += 1
        self.samples_done += samples
        self.batches_done += 1 + self.to_skip
        self.to_skip = 0
        self.progress_generation = self.generation
        self._fruitless = []

    def note_skipped(self) -> None:
        """A batch whose training was interrupted has been left out: registered states are past it now."""
        if self.to_skip == 0:
            raise ValueError("no batch is to be skipped; leave out as many as batches_to_skip says")
        self.to_skip -= 1
        self.batches_done += 1

    def start_over(self) -> None:
        """Back to the beginning of training; what has happened to workers is not forgotten."""
        self.went_back = self.generation
        self.steps_done = self.samples_done = self.batches_done = self.to_skip = 0
        self.pls_total, self.charges = 0.0, ()
        self.saves, self.row_saves = {}, []

    def add_pls(self, added: float | None, charges: Collection[Charge] = ()) -> None:
        """Samples were lost.

        Args:
            added: None: nobody knows how large a portion.
            charges: which ones. Who dies before this recovery is over loses the same samples again, and by
                these everybody knows it then.
        """
        self.pls_total = None if added is None or self.pls_total is None else self.pls_total + added
        sizes = {each.world_size for each in charges}
        known = {(each.world_size, each.rank): each for each in self.charges if each.world_size in sizes}
        self.charges = tuple({**known, **{(each.world_size, each.rank): each for each in charges}}.values())

    def note_seconds(self, seconds: dict[str, float]) -> Recovery:
        """What the newest beginning took, as far as it is known; the story with it."""
        *older, newest = self._recoveries
        newest = replace(newest, seconds=dict(seconds))
        self.recoveries = [*older, newest]
        return newest

    def note_save(self) -> None:
        """A save begins that holds every row as of about now, or counts as if it did."""
        self.saves[self.steps_done] = self.samples_done
        for step in sorted(self.saves)[:-SAVES_KEPT]:
            del self.saves[step]

    def note_row_save(self) -> None:
        """A save of some rows begins."""
        remembered = sorted(self.saves)[-2:]  # the newest may turn out to have failed
        since = remembered[0] if remembered else 0
        self.row_saves = [*(step for step in self.row_saves if step > since), self.steps_done]

    @property
    def row_saves_since(self) -> int:
        """Saves of some rows after the newest one that counts as a whole table."""
        newest = max(self.saves, default=0)
        return sum(step > newest for step in self.row_saves)

    def forget_save(self, step: int) -> None:
        """The save that began after this step has failed."""
        self.saves.pop(step, None)
        self.row_saves = [each for each in self.row_saves if each != step]

    def forget_saves_after(self, step: int) -> None:
        """Saves that began later were never committed: whoever made them has died meanwhile."""
        for later in [each for each in (*self.saves, *self.row_saves) if each > step]:
            self.forget_save(later)

    def samples_at(self, step: int) -> int:
        """Samples done at a save; of one that is not known of, rather too few than too many.

        Before the oldest that is known of, each step counts as many as those up to there did on average.
        """
        if older := [each for each in self.saves if each <= step]:
            return self.saves[max(older)]
        known = {self.steps_done: self.samples_done, **self.saves}
        oldest = min(known)
        if oldest <= step:  # no save is known of
            return known[oldest]
        return known[oldest] * step // oldest

    @property
    def samples_between_saves(self) -> float | None:
        """On average, between the newest saves that count; None: fewer than two are known of."""
        if len(self.saves) < 2:
            return None
        samples = sorted(self.saves.values())
        return (samples[-1] - samples[0]) / (len(samples) - 1)

    def begin(
        self, generation: int, endings: tuple[Ending, ...], interrupted: bool, policy: RecoveryPolicy
    ) -> None:
        """A new generation goes on with what the one before left.

        Args:
            generation: the new one.
            endings: of the workers before.
            interrupted: whether they had begun with the step after the last one.
            policy: how many may be in vain.

        Raises:
            NoProgressError: too many generations before it have not finished a step.
        """
        without_progress = generation - 1 - self.progress_generation
        if without_progress > 0:
            what = "; ".join(map(str, endings)) or "nobody knows of what"
            self._fruitless.append(f"generation {generation - 1} ended: {what}")
        self.generation = generation
        self.to_skip += interrupted
        if without_progress >= policy.max_generations_without_progress:
            told = "\n  ".join(self._fruitless)
            raise NoProgressError(
                f"{without_progress} generations of workers in a row ended without finishing step "
                f"{self.steps_done + 1}; the run stops here instead of trying again:\n  {told}\n"
                "What to do: look into the causes above; the memory of the run is kept until its launcher "
                "ends, and the newest checkpoint stays"
            )

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
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
        """Go back to where a run was; of what has happened to its workers since, nothing is forgotten."""
        for name in ("steps_done", "samples_done", "batches_done", "to_skip", "pls_total"):
            setattr(self, name, state[name])
        self.saves = dict(state["saves"])
        self.row_saves = list(state.get("row_saves", ()))  # runs that began without it have none
        self.charges = tuple(Charge(*each) for each in state["charges"])
        stored = [Recovery.from_dict(each) for each in json.loads(state["recoveries"])]
        if len(stored) > len(self._recoveries):
            self.recoveries = stored

    def take_over(self, state: dict[str, Any]) -> None:
        """Be the course that the generation before left."""
        self.load_state_dict(state)
        self.generation = state["generation"]
        self.progress_generation = state["progress_generation"]
        self.went_back = state["went_back"]
        self._fruitless = list(state["fruitless"])
