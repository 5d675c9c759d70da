"""Simulated runs agree with timelines computed by hand, and with a simulation second by second."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.estimator.failures.arrivals import Failure
from cpr.estimator.planning.formulas import Job
from cpr.estimator.planning.mirror import MirrorModel
from cpr.estimator.simulation.trials import MirrorRuns, PartialRuns, Runs

MIRROR = MirrorModel(
    rows=16 << 16, row_bytes=256, changed_rows=1, step_s=1.0, slows_s=0.0, every_steps=5, share=0.75
)
"""Whole after 12 s of training, and 2 s behind, for three quarters of the rows."""
KINDS = {"full": Runs, "partial": PartialRuns, "mirror": partial(MirrorRuns, mirror=MIRROR)}
PARTS = ("save_s", "lost_s", "load_s", "reschedule_s", "pls", "failures", "finished")


class Given:
    """Failures of one run, as (second, node) or (second, node, number of nodes)."""

    def __init__(self, failures):
        self._failures = iter(failures)

    def next(self):
        at_s, node, num_nodes = (*next(self._failures, (np.inf, 0)), 1)[:3]
        return Failure(np.array([float(at_s)]), np.array([node]), np.array([num_nodes]))


def job(**changes):
    """100 s of training on 4 nodes; saves of 10 s, loading 5 s, rescheduling 3 s."""
    values = {"T_total": 100, "T_fail": 50, "O_save": 10, "O_load": 5, "O_res": 3, "N_emb": 4}
    return Job(**(values | changes))


def simulate(kind, failures, interval_s=30, give_up_s=1e6, **changes):
    trials = KINDS[kind](job(**changes), interval_s, give_up_s, 1).run(Given(failures))
    return {name: getattr(trials, name).item() for name in PARTS}


def costs(save=0.0, lost=0.0, load=0.0, reschedule=0.0, lost_node_s=0.0, failures=0, finished=True):
    values = (save, lost, load, reschedule, lost_node_s / 400, failures, finished)
    return dict(zip(PARTS, values, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_only_saves_cost_without_failures(kind):
    """Due at 30, 60 and 90 s of training; rounding must not move the one at the end."""
    assert simulate(kind, []) == costs(save=30)
    assert simulate(kind, [], interval_s=100 / 3) == costs(save=30)


def test_failure_during_a_save_in_the_background():
    """Training waits 2 s and continues at 32 s; at 39 s it has done 37 s, the save needs 1 s more."""
    broken = {"blocked_save": 2, "failures": [(39, 0)]}
    assert simulate("full", **broken) == costs(save=8, lost=37, load=5, reschedule=3, failures=1)
    # Saved again at 37 s of training, and then each 30 s: 67, 97.
    assert simulate("partial", **broken) == costs(save=8, load=5, reschedule=3, lost_node_s=37, failures=1)
    whole = {"blocked_save": 2, "failures": [(40, 0)]}
    assert simulate("full", **whole) == costs(save=6, lost=8, load=5, reschedule=3, failures=1)
    assert simulate("partial", **whole) == costs(save=6, load=5, reschedule=3, lost_node_s=8, failures=1)


def test_node_loses_only_what_it_learned_since_its_last_loss():
    """At 10 s of training, and at 20 s (clock: 10 s, 8 s for the recovery, 10 s)."""
    twice = simulate("partial", [(10, 2), (28, 2)])
    assert twice == costs(save=30, load=10, reschedule=6, lost_node_s=10 + 10, failures=2)
    others = simulate("partial", [(10, 2), (28, 3)])
    assert others == costs(save=30, load=10, reschedule=6, lost_node_s=10 + 20, failures=2)


def test_partly_surviving_memory_loses_a_share():
    """A quarter of a node's rows is lost on average."""
    run = simulate("partial", [(20, 0)], nodes_lost=0.25)
    assert run == costs(save=30, load=5, reschedule=3, lost_node_s=5, failures=1)


def test_group_of_neighbours_fails_together():
    """Nodes 3, 0 and 1 at 20 s; then node 0, which has lost that already, and node 2, at once."""
    run = simulate("partial", [(20, 3, 3), (20, 0), (20, 2)])
    assert run == costs(save=30, load=5, reschedule=3, lost_node_s=60 + 0 + 20, failures=3)
    assert simulate("full", [(20, 3, 3)]) == simulate("full", [(20, 3)])


@pytest.mark.parametrize(
    ("failures", "from_mirror", "from_save"),
    [
        ([(12, 1)], 2, 0),
        ([(11, 1)], 0, 11),  # the first mirror is not whole
        ([(12, 1), (31, 1)], 2, 23),  # nor is the second after 11 s; 8 s are the recovery's
        ([(12, 1), (32, 1)], 2 + 2, 0),
        ([(12, 1), (13, 1)], 2, 0),  # again, while it recovers: nothing more to lose
        ([(12, 1), (13, 3)], 2 + 2, 0),  # mirrors are whole until training resumes
        ([(12, 1), (13, 2)], 2 + 2, 12),  # the keeper of 1 dies before 1 has its rows
        ([(12, 2), (13, 1)], 2, 12),  # 1 has lost its keeper
        ([(12, 3), (13, 0)], 2 + 2, 12),  # the ring: 0 keeps what 3 had
        ([(12, 1, 2)], 2, 12),  # both at once: only 2 has a keeper
        ([(12, 1, 4)], 0, 48),
    ],
)
def test_mirror_helps_unless_the_keeper_is_lost_too(failures, from_mirror, from_save):
    """`from_save`: seconds of training that a node lost whose mirror did not help; there is no save yet.

    A quarter of the rows has no mirror, and loses what nodes lose without.
    """
    changes = {"interval_s": 100, "T_total": 100}
    lost_s = 400 * simulate("mirror", failures, **changes)["pls"]
    without_s = 400 * simulate("partial", failures, **changes)["pls"]
    assert lost_s == pytest.approx(0.75 * (from_mirror + from_save) + 0.25 * without_s, abs=1e-3)


def test_keeper_in_another_rack():
    mirror = replace(MIRROR, distance=2, share=1.0)
    runs = MirrorRuns(job(), 100, 1e6, 1, mirror).run(Given([(20, 3, 2)]))
    assert runs.pls == pytest.approx((2 + 2) / 400, rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_run_without_progress_ends_unfinished(kind):
    """Each recovery is broken in its last second, for ever."""
    run = simulate(kind, ((10 + 7 * number, 0) for number in range(10_000)), give_up_s=1000)
    assert not run["finished"]
    assert run["reschedule_s"] + run["load_s"] == pytest.approx(1000 - 10, abs=7)


def test_failures_of_parallel_runs_are_separate():
    class Two:
        moments = iter([(55.0, 20.0), (np.inf, 200.0)])

        def next(self):
            return Failure(np.array(next(self.moments)), np.array([0, 0]), np.array([1, 1]))

    trials = Runs(job(), 30, 1e6, 2).run(Two())
    assert trials.lost_s.tolist() == [15, 20]
    assert trials.failures.tolist() == [1, 1]


@st.composite
def stories(draw):
    """A job in whole seconds, the interval, and failures."""
    save = draw(st.integers(1, 12))
    blocked = draw(st.none() | st.integers(0, save))
    shortest = 1 if blocked is None else max(1, save - blocked)
    changes = {
        "T_total": draw(st.integers(save, 80)),
        "O_save": save,
        "blocked_save": blocked,
        "O_load": draw(st.integers(0, 6)),
        "O_res": draw(st.integers(0, 6)),
    }
    interval = draw(st.integers(shortest, changes["T_total"]))
    moments = sorted(draw(st.lists(st.integers(0, 150), max_size=12)))
    return changes, interval, [(moment, draw(st.integers(0, 3))) for moment in moments]


@given(stories(), st.sampled_from(sorted(KINDS)))
def test_arithmetic_agrees_with_second_by_second_simulation(story, kind):
    changes, interval_s, failures = story
    run = simulate(kind, failures, interval_s=interval_s, **changes)
    assert run == pytest.approx(tick_by_tick(job(**changes), interval_s, kind, failures))


class PlainMirror:
    """The rules of mirrors for one run, node by node."""

    def __init__(self, num_nodes):
        self.num_nodes, self.lost_until = num_nodes, [0] * num_nodes
        self.resumed, self.is_whole, self.struck = 0, False, set()

    def lose(self, node, done, saved):
        """Seconds of training that mirrored rows lose as a node is struck."""
        if done > self.resumed:
            self.is_whole = done - self.resumed >= MIRROR.fill_s
            self.resumed, self.struck = done, set()
        is_new, lost = node not in self.struck, 0
        self.struck.add(node)
        for each in (node, (node - 1) % self.num_nodes):
            unsaved = done - max(saved, self.lost_until[each])
            if each in self.struck and not (self.is_whole and (each + 1) % self.num_nodes not in self.struck):
                lost, self.lost_until[each] = lost + unsaved, done
            elif each == node and is_new:
                lost += min(MIRROR.age_s, unsaved)
        return lost


def tick_by_tick(job, interval, kind, failures):
    """The rules, simulated second by second as plainly as possible."""
    blocked = job.O_save if job.blocked_save is None else job.blocked_save
    parts = dict.fromkeys(PARTS, 0.0)
    done = saved = now = reschedule = load = waits = 0
    due, save_of, save_began = interval, None, None
    lost_until, mirror = [0] * job.N_emb, PlainMirror(job.N_emb)
    share = MIRROR.share if kind == "mirror" else 0
    coming = list(failures)
    while True:
        if save_of is not None and now - save_began >= job.O_save:
            saved, save_of = save_of, None
        if reschedule == load == waits == 0 and done == due:
            save_of, save_began, waits, due = done, now, blocked, done + interval
        if done == job.T_total and reschedule == load == waits == 0:
            return {**parts, "finished": True}
        if coming and coming[0][0] == now:
            _, node = coming.pop(0)
            parts["failures"] += 1
            if kind != "full":
                unsaved = done - max(saved, lost_until[node])
                lost = share * mirror.lose(node, done, saved) + (1 - share) * unsaved
                parts["pls"] += lost / (job.T_total * job.N_emb)
                lost_until[node] = done
                due = due if save_of is None else done
            else:
                parts["lost_s"] += done - saved
                done, due = saved, saved + interval
            save_of, waits, reschedule, load = None, 0, job.O_res, job.O_load
            continue  # without a recovery, a save may begin in this very second
        now += 1
        if reschedule:
            reschedule, parts["reschedule_s"] = reschedule - 1, parts["reschedule_s"] + 1
        elif load:
            load, parts["load_s"] = load - 1, parts["load_s"] + 1
        elif waits:
            waits, parts["save_s"] = waits - 1, parts["save_s"] + 1
        elif done < job.T_total:
            done += 1
