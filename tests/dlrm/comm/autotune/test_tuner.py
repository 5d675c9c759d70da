"""The tuner from the first step to the next choice, with simulated times."""

from types import SimpleNamespace

import pytest
import torch

from dlrm.comm.autotune import tuner as tuner_module
from dlrm.comm.autotune.candidates import ExchangeEstimate
from dlrm.comm.autotune.online_trial import LEAST_ROUNDS, MOST_ROUNDS, STEPS
from dlrm.comm.autotune.tuner import DENSE_STEPS, ExchangeTuner

CPU = torch.device("cpu")
GRADIENT = torch.zeros(3)
NAMES = ("ring", "tree", "all_gather")


class Machine:
    """A machine with given times of exchanges, by name of the collective."""

    def __init__(self, monkeypatch, **exchange_s):
        self.exchange_s = exchange_s
        self.choices = 0
        self.bytes_per_s = 1e9
        monkeypatch.setattr(tuner_module, "measure_links", self._links)
        monkeypatch.setattr(tuner_module, "estimate", self._estimate)

    def _links(self, device, group):
        slowest = SimpleNamespace(bytes_per_s=self.bytes_per_s)
        return SimpleNamespace(describe=lambda: "links", slowest=slowest)

    def _estimate(self, candidates, gradient, links, group):
        self.choices += 1
        return [
            ExchangeEstimate(
                name=each.name,
                kind="sparse" if each.name == "all_gather" else "lossless",
                sent_bytes=1.0,
                predicted_s=0.0,
                timed_s=self.exchange_s[each.name],
            )
            for each in candidates
        ]

    def run(self, tuner, steps, rest_s=1.0):
        """Run steps; returns their collectives, None: as before."""
        found, current = [], "ring"
        for _ in range(steps):
            made = tuner.choose(GRADIENT)
            found.append(made and made.name)
            current = found[-1] or current
            tuner.observe(rest_s + self.exchange_s[current], self.exchange_s[current])
        return found


def make():
    collectives = [SimpleNamespace(name=name) for name in NAMES]
    return ExchangeTuner([SimpleNamespace(name=each.name, collective=each) for each in collectives], CPU)


TRIED = (1 + STEPS) * LEAST_ROUNDS
TRIAL = 3 * TRIED + LEAST_ROUNDS - 1
"""Steps of three finalists of which one wins all rounds, with one step between two rounds."""


def test_training_starts_dense_then_tries_candidates_and_keeps_the_fastest(world_of_one, monkeypatch):
    machine = Machine(monkeypatch, ring=0.3, tree=0.25, all_gather=0.1)
    tuner = make()
    assert machine.run(tuner, DENSE_STEPS) == [None] * DENSE_STEPS
    tried = machine.run(tuner, TRIAL - 1)
    assert tuner.chosen is None
    tried += machine.run(tuner, 1)
    assert tuner.is_settled
    assert {name: tried.count(name) for name in NAMES} == {
        "ring": TRIED,
        "tree": TRIED,
        "all_gather": TRIED + LEAST_ROUNDS - 1,  # the best so far, between rounds
    }
    assert set(machine.run(tuner, 20)) == {"all_gather"}
    assert tuner.chosen.name == "all_gather"
    assert machine.choices == 1


def test_a_first_choice_between_similar_candidates_may_change(world_of_one, monkeypatch, caplog):
    caplog.set_level("INFO", logger="dlrm.comm.autotune.tuner")
    machine = Machine(monkeypatch, ring=0.30, tree=0.2, all_gather=9.0)
    tuner = make()
    machine.run(tuner, DENSE_STEPS)
    while tuner.chosen is None:
        machine.run(tuner, 2 * (1 + STEPS) + 1)  # a round of two, and a step between
        machine.exchange_s["tree"] = 0.6 - machine.exchange_s["tree"]  # it wins every other round
    assert not tuner.is_settled
    machine.exchange_s["tree"] = 0.31
    machine.run(tuner, 2 * (1 + STEPS) * MOST_ROUNDS)
    assert tuner.is_settled
    assert tuner.chosen.name == "ring"
    assert sum("(so far)" in message for message in caplog.messages) in {1, 2}
    assert sum("ring" in message and "(so far)" not in message for message in caplog.messages)


def test_a_single_candidate_is_chosen_without_a_trial(world_of_one, monkeypatch):
    machine = Machine(monkeypatch, ring=0.01, tree=0.5, all_gather=0.001)
    tuner = make()
    machine.run(tuner, DENSE_STEPS)
    assert machine.run(tuner, 2) == ["ring", "ring"]
    assert tuner.chosen.name == "ring"


def test_candidates_are_tried_again_when_the_time_of_exchanges_drifts(world_of_one, monkeypatch):
    monkeypatch.setattr(tuner_module, "CHECK_STEPS", 5)
    machine = Machine(monkeypatch, ring=0.3, tree=0.5, all_gather=0.1)
    tuner = make()
    machine.run(tuner, DENSE_STEPS + TRIAL + 10)
    assert (tuner.chosen.name, machine.choices) == ("all_gather", 1)
    machine.exchange_s = {"ring": 0.3, "tree": 0.5, "all_gather": 0.9}
    machine.run(tuner, 100)
    assert (tuner.chosen.name, machine.choices) == ("ring", 2)


@pytest.mark.parametrize(("factor", "plans"), [(1.5, 1), (3.0, 2), (0.3, 2)])
def test_candidates_are_tried_again_when_the_speed_of_links_drifts(factor, plans, world_of_one, monkeypatch):
    """Though what was chosen sends so little that it takes no other time."""
    monkeypatch.setattr(tuner_module, "CHECK_STEPS", 5)
    monkeypatch.setattr(tuner_module, "CHECKS_PER_PROBE", 3)
    machine = Machine(monkeypatch, ring=0.3, tree=0.5, all_gather=0.1)
    tuner = make()
    machine.run(tuner, DENSE_STEPS + TRIAL + 30)
    assert (tuner.chosen.name, machine.choices) == ("all_gather", 1)
    machine.bytes_per_s *= factor
    machine.run(tuner, 100)
    assert machine.choices == plans


def test_loading_a_state_replaces_the_current_choice(world_of_one, monkeypatch):
    monkeypatch.setattr(tuner_module, "CHECK_STEPS", 5)
    machine = Machine(monkeypatch, ring=0.3, tree=0.25, all_gather=0.1)
    tuner, settled = make(), make()
    machine.run(settled, DENSE_STEPS + TRIAL + 10)
    machine.run(tuner, DENSE_STEPS + TRIAL // 2)
    assert not tuner.is_settled
    assert tuner.state_dict()["chosen"] is None
    tuner.load_state_dict(settled.state_dict())
    assert tuner.is_settled
    assert machine.run(tuner, 20) == ["all_gather"] * 20
    machine.exchange_s = dict.fromkeys(NAMES, 0.4)  # another machine
    machine.run(tuner, 100)
    assert machine.choices > 2, "drift from the loaded state was not noticed"
    for other in ({}, settled.state_dict() | {"num_ranks": 2}):
        tuner.load_state_dict(other)
        assert tuner.chosen is None
        assert machine.run(tuner, DENSE_STEPS) == [None] * DENSE_STEPS
    machine.exchange_s = {"ring": 0.3, "tree": 0.25, "all_gather": 0.1}
    machine.run(tuner, TRIAL)
    assert tuner.chosen.name == "all_gather"
