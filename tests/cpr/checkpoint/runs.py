"""A model in training with its checkpointer, in a world of one."""

import torch

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from tests.cpr.shards import models

ROWS = {"a": 100, "b": 40}
LAYOUT = {"a": "tw", "b": "cw"}


def adagrad(model):
    return torch.optim.Adagrad(model.module.dense.parameters(), lr=0.1)


class Run:
    """A model in training, and its checkpointer.

    `make_optimizer` makes the registered optimizer of a model; by default, one of the dense part.
    """

    def __init__(self, folder, layout=None, rows=None, before_save=None, make_optimizer=adagrad, **options):
        rows = rows or ROWS
        torch.manual_seed(7)
        self.model = models.shard(layout or LAYOUT, ebc=models.bags(**rows))
        self.rows = rows
        self.optimizer = make_optimizer(self.model)
        config = CheckpointConfig(uri=str(folder), **options)
        self.checkpointer = Checkpointer(self.model, config, before_save=before_save)
        self.checkpointer.register("optimizer", self.optimizer)
        for shard in self.checkpointer.shards:
            shard.weights.copy_(torch.randn(shard.weights.shape))

    def train(self, steps):
        for _ in range(steps):
            done = self.checkpointer.steps_done
            self.optimizer.zero_grad()
            batch = models.batch(done, 8, **self.rows)
            self.model({"ebc": batch}).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step()

    def save(self, steps=0):
        """Train some steps, then make a consistent full checkpoint and wait for it."""
        self.train(steps)
        self.checkpointer.save("consistent")
        self.checkpointer.wait_until_idle()

    def values(self):
        """Copies of everything that a checkpoint must restore."""
        tables = {
            f"{shard.name}/{name}": column.detach().clone()
            for shard in self.checkpointer.shards
            for name, column in shard.columns.items()
        }
        dense = {name: value.detach().clone() for name, value in self.model.module.dense.state_dict().items()}
        sums = {f"sum/{i}": state["sum"].clone() for i, state in enumerate(self.optimizer.state.values())}
        return {**tables, **dense, **sums, "steps": torch.tensor(self.checkpointer.steps_done)}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def reopened(start, run, **options):
    """Closes a run; returns another one that has loaded what it saved."""
    run.checkpointer.close()
    again = start(**options)
    again.checkpointer.load()
    return again


def flip_bit(path):
    """The disk loses a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
