"""Dense synchronization on one rank, and of a run that changes its exchange; see also tests/system/comm."""

import logging

import torch
from torch import nn

from dlrm.comm.config import CommConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.base import DenseSync
from dlrm.dense_sync.selective import SelectiveSync


def test_a_single_rank_exchanges_nothing(world_of_one):
    for comm in (None, CommConfig(exchange="all_gather")):
        layer = nn.Linear(3, 1)
        replicas = AllReduceSync(list(layer.parameters()), 2, comm)
        layer(torch.ones(3)).backward()
        before = [parameter.grad for parameter in layer.parameters()]
        scalars = torch.tensor([1.0, 2.0])
        assert replicas.average(scalars) is scalars
        assert all(parameter.grad is each for parameter, each in zip(layer.parameters(), before, strict=True))
        replicas.updated(0.1)
        assert replicas.take_figures() is None
        assert replicas.settle() is None


def test_dropped_residuals_cause_a_warning(world_of_one, caplog):
    with caplog.at_level(logging.WARNING):
        DenseSync().load_state_dict({}, steps_done=9)
        DenseSync().load_state_dict({"exchange": {"owners": 0}}, steps_done=9)
        assert caplog.messages == []
        layer = nn.Linear(2, 1)
        apart = SelectiveSync(
            list(layer.parameters()), torch.optim.SGD(layer.parameters()), 0.3, save_every_steps=0
        )
        apart.load_state_dict({"exchange": {"owners": 2}}, steps_done=9)
    assert len(caplog.messages) == 1
    assert "resume with comm.exchange=ring for some steps" in caplog.messages[0]
    assert apart.state_dict() == {"apart": {"is_apart": False}}


def test_replicas_are_averaged_in_saved_steps_of_a_resumed_run(world_of_one):
    """A run resumes after 8 steps, and saves after steps 10 and 15."""
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    apart = SelectiveSync(list(layer.parameters()), optimizer, 1e9, save_every_steps=5)
    apart.load_state_dict({}, steps_done=8)
    joined = []
    for _ in range(8):
        layer(torch.ones(2)).sum().backward()
        apart.average(torch.zeros(1))
        optimizer.step()
        apart.updated(0.1)
        joined.append(not apart.state_dict()["apart"]["is_apart"])
    assert [step for step, is_joined in enumerate(joined, start=9) if is_joined] == [10, 15]
