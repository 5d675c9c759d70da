"""The failures of `experiments.recovery_soak`: their kinds and times, and nodes that are replaced."""

from random import Random
from threading import Event, Thread
from typing import Final

from cpr.faults import (
    AtRate,
    AtTime,
    DamageFile,
    Hang,
    KillAgent,
    Killer,
    KillWorker,
    Kind,
    LoseNode,
    Partition,
    PauseNode,
    Plan,
    Raise,
    Slow,
    StorageError,
    StorageOutage,
)
from experiments.recovery.launch import NodesRun

OUTSIDE: Final[tuple[Kind, ...]] = (
    KillWorker(),
    KillWorker(),
    KillWorker(wipe=True),
    KillAgent(),
    KillAgent(workers=False),
    LoseNode(),
    Partition(duration_s=5.0),
    Partition(duration_s=40.0),
    PauseNode(duration_s=5.0),
    PauseNode(duration_s=45.0),
    Hang(duration_s=5.0),
    Hang(duration_s=300.0),
    DamageFile(),
)
INSIDE: Final[tuple[Kind, ...]] = (
    Raise(),
    KillWorker(),
    Slow(num_steps=50, factor=3.0),
    StorageError(),
    StorageOutage(duration_s=30.0),
    StorageOutage(duration_s=60.0, reads=False, error="ENOSPC"),
    StorageOutage(duration_s=20.0, how="hang"),
)
QUICK_INSIDE: Final[tuple[tuple[float, Kind], ...]] = (
    (8.0, StorageOutage(duration_s=3.0)),
    (35.0, StorageOutage(duration_s=3.0, how="hang")),
)
QUICK_OUTSIDE: Final[tuple[tuple[float, Kind], ...]] = (
    (2.0, KillWorker()),
    (47.0, PauseNode(duration_s=12.0)),
    (68.0, LoseNode()),
)
"""Seconds after the start, so that all of them happen in a short run."""
QUICK_LOSSES_S: Final = (10.0, 30.0)
INSIDE_SHARE: Final = 0.25
"""Share of the failures that workers inject into themselves; the others come from outside."""
REPLACED: Final = 1
"""The node that is replaced; the first node hosts the rendezvous, which a replacement needs."""
LONG_S: Final = 1e6
POLL_S: Final = 0.5


def plans(mean_s: float, seed: int, quick: bool, partitions: bool) -> tuple[Plan, Plan]:
    """The failures that workers inject into themselves, and those that come from outside.

    Args:
        mean_s: mean time between failures.
        seed: decides kinds, times and victims.
        quick: only a few, which are sure to happen in a short run.
        partitions: whether links can be cut.
    """
    if quick:
        inside, outside = (
            tuple(
                AtTime(time_s=time_s, kind=kind, seed=seed)
                for time_s, kind in timed
                if partitions or not isinstance(kind, Partition)
            )
            for timed in (QUICK_INSIDE, QUICK_OUTSIDE)
        )
        return Plan(schedules=inside), Plan(schedules=outside)
    kinds = tuple(kind for kind in OUTSIDE if partitions or not isinstance(kind, Partition))
    often = AtRate(mean_s=mean_s / (1 - INSIDE_SHARE), seed=seed + 1, kinds=kinds)
    seldom = AtRate(mean_s=mean_s / INSIDE_SHARE, seed=seed, kinds=INSIDE)
    return Plan(schedules=(seldom,)), Plan(schedules=(often,))


def lost_nodes(minutes: float, seed: int, quick: bool) -> tuple[Plan, Plan]:
    """The same with nodes that are lost as the only failures, about one each minute, a random one.

    None is lost within half a minute after another: with two nodes, none has a mirror while that is filled
    anew, and the soak has failures as close as they come.
    """
    random = Random(seed)
    times_s = [60.0 * (number + random.uniform(-0.25, 0.25)) for number in range(1, round(2 * minutes))]
    schedules = tuple(
        AtTime(time_s=time_s, kind=LoseNode(), seed=seed + number)
        for number, time_s in enumerate(QUICK_LOSSES_S if quick else times_s)
    )
    return Plan(schedules=()), Plan(schedules=schedules)


class Replacements:
    """Cuts a node off, starts a spare in its place, and retires the spare when the node is back.

    The last time, near the end of training, the node returns when the others have finished.

    Args:
        run: with a spare node.
        killer: strikes the spare instead of the node that is away.
        at_s: when the node is cut off for the first time.
        away_s: how long the node is cut off.
        replaced_for_s: how long the spare has the node's place, or waits for it.
        last_step: the step after which the node is cut off for the last time.
    """

    def __init__(
        self,
        run: NodesRun,
        killer: Killer,
        *,
        at_s: float,
        away_s: float,
        replaced_for_s: float,
        last_step: int,
    ) -> None:
        self.done = 0
        """How often the node has come back."""
        self._run, self._killer = run, killer
        self._at_s, self._away_s, self._replaced_for_s = at_s, away_s, replaced_for_s
        self._last_step = last_step
        self._over = Event()
        self._thread = Thread(target=self._work, name="replacements")

    def __enter__(self) -> "Replacements":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _work(self) -> None:
        if self._over.wait(self._at_s):
            return
        self._replace()
        while self._run.steps_done < self._last_step:
            if self._over.wait(POLL_S):
                return
        self._be_away_at_the_end()

    def _replace(self) -> None:
        original = self._run.nodes[REPLACED]
        if not self._cut_off(self._away_s) or self._over.wait(self._replaced_for_s):
            return
        self._killer.replace(REPLACED, original)
        self._run.retire_spare()
        self.done += 1

    def _be_away_at_the_end(self) -> None:
        link = self._run.nodes[REPLACED].link
        assert link is not None
        if self._cut_off(LONG_S):
            while not self._run.is_reported:
                if self._over.wait(POLL_S):
                    return
            link.heal()
            self.done += 1

    def _cut_off(self, away_s: float) -> bool:
        if not self._killer.fire(Partition(duration_s=away_s), target=REPLACED).happened:
            return False
        self._killer.replace(REPLACED, self._run.start_spare())
        return True
