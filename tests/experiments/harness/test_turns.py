"""Rounds of contenders in turns."""

import json
import os
import subprocess
import sys

import pytest

from experiments.harness import turns
from experiments.harness.network import Network
from experiments.harness.turns import Effort, ratios, take_turns

NUM_VALUES = 60_000
WORKER = f"""
import torch
import torch.distributed as dist
from experiments.harness.turns import seconds_and_bytes_of
dist.init_process_group("gloo")
values = torch.zeros({NUM_VALUES})
send = lambda: dist.broadcast(values, 0)
send()
print([seconds_and_bytes_of(work)[1] for work in (lambda: None, send)], flush=True)
dist.barrier()
"""
EFFORT = Effort(full_rounds=2, least_rounds=6, most_rounds=20, seconds=10.0, reach=0.01)


@pytest.mark.parametrize(
    ("rounds", "elapsed_s", "expected"),
    [
        ([{"ddp": 2.0, "dense": 1.0}] * 5, 99.0, False),  # too few, however long they took
        ([{"ddp": 2.0, "dense": 1.0}] * 6, 0.0, True),  # all alike
        ([{"ddp": 2.0 + number % 3, "dense": 1.0} for number in range(8)], 9.0, False),
        ([{"ddp": 2.0 + number % 3, "dense": 1.0} for number in range(8)], 11.0, True),  # time is up
        ([{"ddp": 2.0 + number % 3, "dense": 1.0} for number in range(20)], 0.0, True),
        ([{"ddp": 2.0, "dense": 1.0, "power_sgd": 1.0 + number % 3} for number in range(8)], 0.0, True),
    ],
)
def test_rounds_are_enough_when_the_ratios_are_known(rounds, elapsed_s, expected):
    assert EFFORT.is_enough(rounds, elapsed_s, "dense", ["ddp"]) is expected


def test_contenders_take_turns_until_none_remains(monkeypatch):
    monkeypatch.setattr(turns, "of_rank_0", lambda function: function())
    left = [["ddp", "dense"], ["ddp"], []]
    asked = []

    def remaining(rounds, elapsed_s):
        asked.append([*map(set, rounds)])
        return left[len(rounds) - 1]

    rounds = take_turns(["tree", "ddp", "dense"], lambda name: float(len(name)), remaining)
    assert rounds == [{"tree": 4, "ddp": 3, "dense": 5}, {"ddp": 3, "dense": 5}, {"ddp": 3}]
    assert asked[-1] == [{"tree", "ddp", "dense"}, {"ddp", "dense"}, {"ddp"}]
    assert ratios(rounds, "dense", "ddp") == [3 / 5, 3 / 5]


@pytest.mark.usefixtures("links")
def test_bytes_of_earlier_work_that_are_still_on_their_way_do_not_count():
    with Network(2) as network:
        network.limit(0.02)  # the broadcast returns at once on rank 0, and takes 0.1 s
        workers = [
            subprocess.Popen(
                [*network.command(rank), sys.executable, "-c", WORKER],
                env=os.environ | network.environment(rank),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            answers = [worker.communicate(timeout=60)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    (nothing, one), _ = map(json.loads, answers)
    assert nothing < 4000
    assert 4 * NUM_VALUES < one < 1.1 * 4 * NUM_VALUES
