"""Launches, pauses, partitions, takeovers, saves and ends in any order break no invariant.

Hypothesis plays random histories of a simulated cluster (`cluster`) against the code that decides and
commits. It must find a violation when one of the rules is switched off, and none as the code is. For a
thorough search, set the number of histories: `CPR_TESTS_HISTORIES=5000 pytest -m system FILE`.
"""

import os
from contextlib import ExitStack, suppress
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cpr.checkpoint.catalog import chain
from cpr.checkpoint.ownership import lock
from cpr.checkpoint.ownership.records import Owner, newest_owner
from cpr.errors import LockedError, MismatchError, RunFinished
from cpr.mirror.copy import MOMENTS_KEPT
from cpr.recovery.decide import lineage
from cpr.recovery.decide.lineage import Directory
from cpr.recovery.restore.pls_budget import Cost, PlsBudget
from cpr.recovery.run.report import LIVE
from tests.cpr.recovery.cluster import RANKS, SAMPLES, TOTAL_SAMPLES, Cluster, KilledError

HISTORIES = int(os.environ.get("CPR_TESTS_HISTORIES", "120"))
"""Random histories, of up to 40 events each."""
ENOUGH_HISTORIES = max(HISTORIES, 3000)
"""Histories in which a violation must be found when a rule is switched off; the search ends at the first."""


class Histories(RuleBasedStateMachine):
    """What may happen to runs on one checkpoint directory."""

    def __init__(self):
        super().__init__()
        self.cluster = Cluster()
        self.nodes = []
        self.finished = False
        """Whether the run has reached its end, and no user has started another since."""
        self.newest_rank = (-1, -1)
        self.exits = ExitStack()
        for target, name, value in (
            (lock, "time", self.cluster.clock),
            (lock, "_place", lambda: self.cluster.place),
            (lock.threading, "Thread", NoThread),
            (chain, "ThreadPoolExecutor", AtOnce),
        ):
            self.exits.enter_context(patch.object(target, name, value))

    def teardown(self):
        self.exits.close()

    @property
    def runs(self):
        return [run for run in self.cluster.clock.runs if run.is_alive]

    @property
    def active(self):
        return [run for run in self.runs if not run.is_paused]

    @rule(resume=st.booleans())
    def a_user_starts_a_run(self, resume):
        """Starts a run on new machines; `resume` is the user's choice for a directory with saves."""
        nodes = [self.cluster.new_node() for _ in range(RANKS)]
        self.nodes += nodes
        with suppress(LockedError):
            self._join(nodes, restarted=False, resume=resume or self.cluster.newest() is not None)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), lost=st.sampled_from([None, *range(RANKS)]), again=st.booleans())
    def workers_die_and_are_started_again(self, data, lost, again):
        """What happens most in practice: the same nodes go on, or one of them is replaced.

        `again`: the new workers die in the middle of the recovery, and others are started.
        """
        run = data.draw(st.sampled_from(self.active))
        nodes = list(run.nodes)
        self.cluster.end(run)
        if lost is not None:
            nodes[lost].memory = nodes[lost].mirror = None
            nodes[lost] = self.cluster.new_node()
            self.nodes.append(nodes[lost])
        with suppress(LockedError, MismatchError, RunFinished):
            if again:
                with suppress(KilledError):
                    self._join(nodes, restarted=True, resume=False, dies=True)
                    return
            self._join(nodes, restarted=True, resume=False)

    @precondition(lambda self: sum(node.run is None for node in self.nodes) >= 1)
    @rule(data=st.data(), replaced=st.booleans())
    def agents_start_workers_again(self, data, replaced):
        """Restarts workers on nodes that are left, in any order; or on one of them and a new machine."""
        free = [node for node in self.nodes if node.run is None]
        if replaced or len(free) < RANKS:
            self.nodes.append(self.cluster.new_node())
            nodes = [data.draw(st.sampled_from(free)), self.nodes[-1]]
        else:
            nodes = data.draw(st.permutations(free))[:RANKS]
        owner = newest_owner(self.cluster.storage)
        is_over = self.finished and any(
            node.memory or node.mirror or node.launch in owner.launches for node in nodes
        )
        with suppress(LockedError, MismatchError):
            try:
                self._join(nodes, restarted=True, resume=False)
                assert not is_over, "a run that has finished continues"
            except RunFinished:
                assert self.finished
                assert all(node.memory is None and node.mirror is None for node in nodes)

    def _join(self, nodes, **how):
        before = self.cluster.newest()
        run = self.cluster.join(nodes, **how)
        self.finished = False
        if run.kind in LIVE and before is not None:
            dense = self.cluster.saved[before.folder][1]
            assert run.dense[: len(dense)] == dense, "memory that does not descend from the newest save"
        if how["restarted"] and before is not None:
            assert run.kind != "start", "a run that starts over though it has saves"

    @precondition(lambda self: self.active)
    @rule(data=st.data(), steps=st.integers(1, 3))
    def train(self, data, steps):
        self.cluster.train(data.draw(st.sampled_from(self.active)), steps)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), rank=st.integers(0, RANKS - 1))
    def a_moment_arrives_in_a_mirror(self, data, rank):
        self.cluster.mirror(data.draw(st.sampled_from(self.active)), rank)

    @precondition(lambda self: self.active)
    @rule(data=st.data(), freeze=st.sampled_from([None, None, "manifest.json"]))
    def save(self, data, freeze):
        run = data.draw(st.sampled_from(self.active))
        if run.dense:
            self.cluster.save(run, freeze=freeze)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def pause(self, data):
        data.draw(st.sampled_from(self.active)).is_paused = True

    @precondition(lambda self: len(self.active) < len(self.runs))
    @rule(data=st.data(), killed=st.booleans())
    def wake(self, data, killed):
        paused = [run for run in self.runs if run.is_paused]
        self.cluster.wake(data.draw(st.sampled_from(paused)), killed=killed)

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def a_worker_dies_or_the_network_does(self, data):
        """Ends all workers of a run; the memory of each stays on its node."""
        self.cluster.end(data.draw(st.sampled_from(self.active)))

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def a_node_is_lost(self, data):
        node = data.draw(st.sampled_from(self.nodes))
        if node.run is not None:
            self.cluster.end(node.run)
        node.memory = node.mirror = None

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def finish(self, data):
        run = data.draw(st.sampled_from(self.active))
        if run.dense:
            owns = run.owns
            self.cluster.finish(run)
            assert not run.is_alive
            self.finished = self.finished or owns

    @invariant()
    def rows_belong_to_the_run_that_trains_them(self):
        for run in self.runs:
            for rows in run.rows:
                steps = iter(run.dense)
                assert all(step in steps for step in rows), "a row that is newer than its run, or of another"

    @invariant()
    def pls_is_what_was_really_lost(self):
        for run in self.runs:
            lost = sum(len(set(run.dense) - set(rows)) for rows in run.rows)
            assert run.progress.pls_total == pytest.approx(lost * SAMPLES / (TOTAL_SAMPLES * RANKS))

    @invariant()
    def the_newest_save_never_goes_backwards(self):
        newest = self.cluster.newest()
        rank = (-1, -1) if newest is None else (newest.epoch, newest.sequence)
        assert rank >= self.newest_rank, "the newest save went backwards"
        if newest is not None and rank > self.newest_rank:
            owners = [run.ownership.epoch for run in self.cluster.clock.runs if run.history is not None]
            assert newest.epoch == max(owners), "a commit of an older epoch"
        self.newest_rank = rank

    @invariant()
    def one_run_owns_the_directory(self):
        assert sum(run.owns for run in self.runs) <= 1

    @invariant()
    def what_has_finished_stays_finished(self):
        owner = newest_owner(self.cluster.storage)
        assert (owner is not None and owner.finished is not None) == self.finished


class NoThread:
    """Replaces threads: the simulated clock renews the records."""

    def __init__(self, **_):
        pass

    def start(self):
        pass

    def join(self):
        pass


class AtOnce:
    """Replaces a thread pool, because starting threads would take most of the time."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    map = staticmethod(map)


def play(num_histories, *phases):
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases or tuple(Phase),
            derandomize=bool(phases),  # a search without a seed takes seconds or minutes, by chance
        ),
    )


@pytest.mark.system
@pytest.mark.timeout(300)
def test_no_history_goes_wrong():
    play(HISTORIES)


ADOPT_ANYTHING = (Directory, "why_stale", lambda *_, **__: None)
MIRRORS_FOR_NOTHING = (PlsBudget, "_cost_of_mirror", lambda *_: Cost())
FORGET_ENDS = (lineage, "_has_finished_without", lambda *_: False)


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("without", "finding"),
    [
        (ADOPT_ANYTHING, "does not descend|newer than its run|newer than the run|samples|assert"),
        (FORGET_ENDS, "a run that has finished continues"),
        ((Owner, "counts", lambda *_: True), "older epoch|backwards"),
        ((lock.DirectoryLock, "check", lambda _: None), "older epoch|backwards|assert"),
    ],
)
def test_each_rule_is_needed(without, finding):
    """Without a rule, some history breaks an invariant."""
    with patch.object(*without), pytest.raises(AssertionError, match=finding):
        play(ENOUGH_HISTORIES, Phase.generate)


@pytest.mark.parametrize("counted", [True, False])
def test_rows_of_an_old_mirror_must_be_counted(counted):
    """The same for costs of mirrors, by a history: a random one that shows it takes minutes to find."""
    with ExitStack() as exits:
        if not counted:
            exits.enter_context(patch.object(*MIRRORS_FOR_NOTHING))
        histories = Histories()
        exits.callback(histories.teardown)
        histories.a_user_starts_a_run(resume=False)
        (run,) = histories.runs
        histories.cluster.train(run, 1)
        histories.cluster.mirror(run, 0)
        histories.cluster.train(run, 2 * MOMENTS_KEPT)  # survivors do not go back so far
        histories.workers_die_and_are_started_again(OnlyOne(), lost=0, again=False)
        (run,) = histories.runs
        assert set(run.dense) - set(run.rows[0]), "rank 0 has the rows of its mirror"
        if counted:
            histories.pls_is_what_was_really_lost()
        else:
            with pytest.raises(AssertionError):
                histories.pls_is_what_was_really_lost()


class OnlyOne:
    """Draws where there is nothing to choose."""

    def draw(self, strategy):
        (only,) = strategy.elements
        return only
