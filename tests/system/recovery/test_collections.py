"""A model with pooled, weighted, shared and unpooled tables loses a node: its tables equal plain PyTorch's.

The reference has whole tables and one process. Where a node was lost, it puts back the rows of that node as
they were saved, and keeps all others.
"""

import copy
import json

import pytest
import torch
from torch import nn

from cpr import CheckpointConfig, Checkpointer
from cpr.faults import AtStep, KillWorker, Plan
from tests.system.recovery import collections_worker as worker

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


class Reference:
    """The model in plain PyTorch."""

    def __init__(self):
        torch.manual_seed(3)
        self.tables = {name: nn.Parameter(worker.values_of(name)) for name in worker.TABLES}
        self.dense = worker.Model().dense
        self.optimizer = torch.optim.Adagrad(
            [*self.tables.values(), *self.dense.parameters()], lr=worker.RATE, eps=worker.EPS
        )

    def sums(self):
        return {name: self.optimizer.state[table]["sum"] for name, table in self.tables.items()}

    def bag(self, table, samples, pooling="sum", weighted=False):
        weights = self.tables[table]
        pooled = []
        for ids, of_ids in samples:
            rows = weights[ids] * (of_ids.unsqueeze(1) if weighted else 1)
            pooled.append(rows.sum(0) / (max(len(ids), 1) if pooling == "mean" else 1))
        return torch.stack(pooled)

    def sequence(self, table, samples):
        return torch.stack([torch.tanh(self.tables[table][ids]).sum() for ids, _ in samples])

    def step(self, number):
        self.optimizer.zero_grad()
        of = worker.samples(number)
        unpooled = {
            (feature, table): self.sequence(table, of[feature])
            for table in worker.COLLECTIONS["unpooled"]
            for feature in worker.TABLES[table][2]
        }
        parts = [
            self.bag("user", of["f"]).sum(1) * self.bag("user", of["g"]).mean(1),
            self.bag("topic", of["h"], "mean").square().sum(1),
            self.bag("shop", of["k"], weighted=True).sum(1),
            sum(unpooled.values()),
            unpooled["s", "item"],
        ]
        self.dense(torch.stack(parts, 1)).squeeze(1).mean().backward()
        self.optimizer.step()


def assert_tables(found, reference):
    for column, wanted in ((3, reference.tables), (4, reference.sums())):
        for name, whole in worker.put_together(found, column).items():
            torch.testing.assert_close(whole, wanted[name].detach(), rtol=1e-4, atol=2e-6, msg=name)


def test_survivors_keep_their_rows_and_a_lost_node_has_its_saved_ones(start, memory, tmp_path, world_of_one):
    kill = AtStep(step=worker.KILL_AT, kind=KillWorker(wipe=True), target=1)
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(Plan(schedules=(kill,)).to_json()))
    process = start(
        "-m", "tests.system.recovery.collections_worker", tmp_path, ranks=2, restarts=1, forks=True,
        environment={"CPR_FAULTS": str(plan), "CPR_RESIDENT_ROOT": str(memory)},
    )  # fmt: skip
    reference, saved = Reference(), {}
    for step in range(worker.KILL_AT):
        if step == worker.SAVE_EVERY:
            saved = copy.deepcopy([dict(reference.tables), reference.sums()])
        reference.step(step)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said[-4000:]

    def of_ranks(name):
        return [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]

    survivor, lost = of_ranks("killed")
    assert_tables([*survivor, *lost], reference)
    with torch.no_grad():
        for name, row, column, weights, _ in lost:
            place = slice(row, row + weights.shape[0]), slice(column, column + weights.shape[1])
            if worker.LAYOUT[name] != "dp":
                for live, old in zip((reference.tables, reference.sums()), saved, strict=True):
                    live[name][place] = old[name][place]
    for step in range(worker.KILL_AT, worker.STEPS):
        reference.step(step)
    story = json.loads((tmp_path / "story-0.json").read_text())
    assert (story["kind"], story["step"], story["save_step"]) == (
        "partial",
        worker.KILL_AT,
        worker.SAVE_EVERY,
    )
    assert {each["rank"] for each in story["losses"]} == {1}
    ends = of_ranks("end")
    assert_tables([piece for pieces in ends for piece in pieces], reference)
    for dense in of_ranks("dense"):
        for name, value in reference.dense.state_dict().items():
            torch.testing.assert_close(dense[name], value, rtol=1e-4, atol=2e-6)
    assert_loads_elsewhere(tmp_path / "checkpoint", ends)


def assert_loads_elsewhere(checkpoint, ends):
    """On one rank under another plan: bit for bit what two ranks had in the end."""
    other = {"user": "tw", "topic": "rw", "shop": "tw", "past": "cw", "seen": "dp", "few": "dp", "item": "rw"}
    model, optimizer = worker.sharded(other)
    with Checkpointer(model, CheckpointConfig(uri=str(checkpoint)), [optimizer]) as checkpointer:
        assert checkpointer.load().state.step == worker.STEPS
        found = worker.pieces(checkpointer.shards)
    for column in (3, 4):
        wanted = worker.put_together([piece for pieces in ends for piece in pieces], column)
        for name, whole in worker.put_together(found, column).items():
            assert torch.equal(whole, wanted[name]), name
