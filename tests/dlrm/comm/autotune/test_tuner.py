"""`auto` from its first step to its next plan, with made-up times."""

from types import SimpleNamespace

import pytest
import torch

from dlrm.comm.autotune import drift as replanning
from dlrm.comm.autotune import tuner as automatic
from dlrm.comm.autotune.candidates import Estimate
from dlrm.comm.autotune.online_trial import MOST_ROUNDS, STEPS
from dlrm.comm.autotune.significance import LEAST_ROUNDS
from dlrm.comm.autotune.tuner import DENSE_STEPS, ExchangeTuner

CPU = torch.device("cpu")
GRADIENT = torch.zeros(3)
NAMES = ("ring", "tree", "all_gather")


class Machine:
    """Times of exchanges and steps on it, by name of the collective."""

    def __init__(self, monkeypatch, **exchange_s):
        self.exchange_s = exchange_s
        self.plans = 0
        self.bytes_per_s = 1e9
        monkeypatch.setattr(automatic, "measure_links", self._links)
        monkeypatch.setattr(replanning, "measure_links", self._links)
        monkeypatch.setattr(automatic, "estimate", self._estimate)

    def _links(self, device, group):
        slowest = SimpleNamespace(bytes_per_s=self.bytes_per_s)
        return SimpleNamespace(describe=lambda: "links", slowest=slowest)

    def _estimate(self, candidates, gradient, links, group):
        self.plans += 1
        return [
            Estimate(
                name=each.name,
                kind="sparse" if each.name == "all_gather" else "lossless",
                sent_bytes=1.0,
                predicted_s=0.0,
                timed_s=self.exchange_s[each.name],
            )
            for each in candidates
        ]

    def run(self, planner, steps, rest_s=1.0):
        """Collectives of these steps; None: as before."""
        found, current = [], "ring"
        for _ in range(steps):
            made = planner.choose(GRADIENT)
            found.append(made and made.name)
            current = found[-1] or current
            planner.observe(rest_s + self.exchange_s[current], self.exchange_s[current])
        return found


def make():
    collectives = [SimpleNamespace(name=name) for name in NAMES]
    return ExchangeTuner([SimpleNamespace(name=each.name, collective=each) for each in collectives], CPU)


TRIED = (1 + STEPS) * LEAST_ROUNDS
TRIAL = 3 * TRIED + LEAST_ROUNDS - 1
"""Steps of three finalists of which one wins all rounds, with one step between two rounds."""


def test_it_is_dense_until_it_knows_steps_then_tries_and_goes_on_with_the_fastest(world_of_one, monkeypatch):
    machine = Machine(monkeypatch, ring=0.3, tree=0.25, all_gather=0.1)
    planner = make()
    assert machine.run(planner, DENSE_STEPS) == [None] * DENSE_STEPS
    tried = machine.run(planner, TRIAL - 1)
    assert planner.chosen is None
    tried += machine.run(planner, 1)
    assert planner.is_settled
    assert {name: tried.count(name) for name in NAMES} == {
        "ring": TRIED,
        "tree": TRIED,
        "all_gather": TRIED + LEAST_ROUNDS - 1,  # the best so far, between rounds
    }
    assert set(machine.run(planner, 20)) == {"all_gather"}
    assert planner.chosen.name == "all_gather"
    assert machine.plans == 1


def test_what_is_chosen_while_some_differ_little_may_change(world_of_one, monkeypatch, caplog):
    caplog.set_level("INFO", logger="dlrm.comm.autotune.tuner")
    machine = Machine(monkeypatch, ring=0.30, tree=0.2, all_gather=9.0)
    planner = make()
    machine.run(planner, DENSE_STEPS)
    while planner.chosen is None:
        machine.run(planner, 2 * (1 + STEPS) + 1)  # a round of two, and a step between
        machine.exchange_s["tree"] = 0.6 - machine.exchange_s["tree"]  # it wins every other round
    assert not planner.is_settled
    machine.exchange_s["tree"] = 0.31
    machine.run(planner, 2 * (1 + STEPS) * MOST_ROUNDS)
    assert planner.is_settled
    assert planner.chosen.name == "ring"
    assert sum("(so far)" in message for message in caplog.messages) in {1, 2}
    assert sum("ring" in message and "(so far)" not in message for message in caplog.messages)


def test_where_one_alone_can_be_worth_it_nothing_is_tried(world_of_one, monkeypatch):
    machine = Machine(monkeypatch, ring=0.01, tree=0.5, all_gather=0.001)
    planner = make()
    machine.run(planner, DENSE_STEPS)
    assert machine.run(planner, 2) == ["ring", "ring"]
    assert planner.chosen.name == "ring"


def test_steps_decide_and_not_exchanges_by_themselves(world_of_one, monkeypatch):
    machine = Machine(monkeypatch, ring=0.3, tree=0.31, all_gather=0.1)
    planner = make()
    machine.run(planner, DENSE_STEPS)
    machine.exchange_s = {"ring": 0.3, "tree": 0.2, "all_gather": 0.6}  # in steps they take as long as this
    machine.run(planner, TRIAL)
    assert planner.chosen.name == "tree"


def test_all_is_tried_again_when_exchanges_take_another_time(world_of_one, monkeypatch):
    monkeypatch.setattr(replanning, "CHECK_STEPS", 5)
    machine = Machine(monkeypatch, ring=0.3, tree=0.5, all_gather=0.1)
    planner = make()
    machine.run(planner, DENSE_STEPS + TRIAL + 10)
    assert (planner.chosen.name, machine.plans) == ("all_gather", 1)
    machine.exchange_s = {"ring": 0.3, "tree": 0.5, "all_gather": 0.9}
    machine.run(planner, 100)
    assert (planner.chosen.name, machine.plans) == ("ring", 2)


@pytest.mark.parametrize(("factor", "plans"), [(1.5, 1), (3.0, 2), (0.3, 2)])
def test_all_is_tried_again_on_links_of_another_speed(factor, plans, world_of_one, monkeypatch):
    """Though what was chosen sends so little that it takes no other time."""
    monkeypatch.setattr(replanning, "CHECK_STEPS", 5)
    monkeypatch.setattr(replanning, "CHECKS_PER_PROBE", 3)
    machine = Machine(monkeypatch, ring=0.3, tree=0.5, all_gather=0.1)
    planner = make()
    machine.run(planner, DENSE_STEPS + TRIAL + 30)
    assert (planner.chosen.name, machine.plans) == ("all_gather", 1)
    machine.bytes_per_s *= factor
    machine.run(planner, 100)
    assert machine.plans == plans


def test_a_planner_that_is_used_goes_on_from_a_state_as_a_new_one_would(world_of_one, monkeypatch):
    machine = Machine(monkeypatch, ring=0.3, tree=0.25, all_gather=0.1)
    planner, settled = make(), make()
    machine.run(settled, DENSE_STEPS + TRIAL)
    machine.run(planner, DENSE_STEPS + TRIAL // 2)
    assert not planner.is_settled
    assert planner.state_dict()["chosen"] is None
    planner.load_state_dict(settled.state_dict())
    assert planner.is_settled
    assert machine.run(planner, 20) == ["all_gather"] * 20
    planner.load_state_dict({})
    assert planner.chosen is None
    assert machine.run(planner, DENSE_STEPS) == [None] * DENSE_STEPS
    machine.run(planner, TRIAL)
    assert planner.chosen.name == "all_gather"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_goes_on_with_what_it_has_chosen_on_as_many_ranks(num_ranks, world_of_one, monkeypatch):
    monkeypatch.setattr(replanning, "CHECK_STEPS", 5)
    machine = Machine(monkeypatch, ring=0.3, tree=0.5, all_gather=0.1)
    planner = make()
    machine.run(planner, DENSE_STEPS + TRIAL + 10)
    again = make()
    again.load_state_dict(planner.state_dict() | {"num_ranks": num_ranks})
    if num_ranks == 1:
        assert machine.run(again, 3) == ["all_gather"] * 3
        machine.exchange_s = dict.fromkeys(NAMES, 0.4)  # the new place is another one
        machine.run(again, 100)
        assert machine.plans == 2
    else:
        assert again.chosen is None
        assert machine.run(again, DENSE_STEPS) == [None] * DENSE_STEPS
