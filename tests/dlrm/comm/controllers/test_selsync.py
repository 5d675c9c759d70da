"""SelSync is bulk-synchronous with delta 0, local with a large delta, and agreed by all ranks."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam

from dlrm.comm.controllers import selsync
from dlrm.comm.controllers.selsync import SelSync, averaged_state
from dlrm.comm.late import LateScalars
from tests.dlrm.comm.controllers.groups import Alone, together

RANKS, STEPS, DIM = 3, 20, 5


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, DIM, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + torch.randn(4, 1, generator=generator)


def loss_of(weight, inputs, targets):
    return (inputs @ weight - targets).square().mean()


def train_selectively(member, delta, optimizer=SGD, **options):
    """One rank's training."""
    weight = torch.nn.Parameter(torch.zeros(DIM, 1))
    dense = optimizer([weight], lr=0.05, **options)
    sync = SelSync(agree=member, delta=delta, total=member.total)
    averaged = []
    for step in range(STEPS):
        dense.zero_grad()
        loss_of(weight, *batch(step, member.rank)).backward()
        is_due, sums = sync.should_sync(weight.grad.norm(), torch.tensor([float(member.rank), 1.0]))
        assert sums.tolist() == [sum(range(RANKS)), RANKS]
        dense.step()
        averaged.append(is_due)
        if is_due:
            sync.average([weight], averaged_state(dense))
    return weight.detach(), [state.clone() for state in averaged_state(dense)], averaged, sync


def train_in_step(ranks=range(RANKS), **options):
    """One process on the batches of these ranks."""
    weight = torch.nn.Parameter(torch.zeros(DIM, 1))
    dense = SGD([weight], lr=0.05, **options)
    for step in range(STEPS):
        dense.zero_grad()
        sum(loss_of(weight, *batch(step, rank)) / len(ranks) for rank in ranks).backward()
        dense.step()
    return weight.detach()


def alone(delta, num_ranks=1):
    """A controller of ranks that all see the same."""
    return SelSync(agree=Alone(num_ranks), delta=delta, total=lambda vector: num_ranks * vector)


def decisions_of(sync, norms):
    return [sync.should_sync(norm, torch.zeros(0))[0] for norm in norms]


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}])
def test_delta_0_is_bulk_synchronous_for_sgd(options):
    expected = train_in_step(**options)
    for weight, _, averaged, sync in together(RANKS, partial(train_selectively, delta=0, **options)):
        assert averaged == [True] * STEPS
        assert sync.is_joined
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_a_huge_delta_is_training_alone():
    ranks = together(RANKS, partial(train_selectively, delta=1e9))
    for rank, (weight, _, averaged, sync) in enumerate(ranks):
        assert averaged == [False] * STEPS
        assert sync._agree.sums == STEPS, "the flag is sent with the scalars"
        assert torch.equal(weight, train_in_step([rank]))
        assert not sync.is_joined
    assert not torch.equal(ranks[0][0], ranks[1][0])


@pytest.mark.parametrize("optimizer", [SGD, Adagrad, Adam])
def test_replicas_and_optimizer_state_are_equal_after_averaging(optimizer):
    options = {"momentum": 0.9} if optimizer is SGD else {}
    ranks = together(RANKS, partial(train_selectively, delta=0, optimizer=optimizer, **options))
    first, states, *_ = ranks[0]
    assert len(states) == (2 if optimizer is Adam else 1)
    for weight, same, *_ in ranks:
        assert torch.equal(weight, first)
        assert all(torch.equal(one, other) for one, other in zip(states, same, strict=True))


def test_one_rank_decides_for_all():
    def work(member):
        sync = SelSync(agree=member, delta=0.5, total=member.total)
        norms = [1.0] * 5 + [30.0 if member.rank == 2 else 1.0]
        return decisions_of(sync, norms)

    assert together(RANKS, work) == [[False] * 5 + [True]] * RANKS


def test_significance_is_the_relative_change_of_the_smoothed_energy():
    """The formula, for 16 ranks: the newest weighs 0.16, and 25 values count."""
    norms = (torch.rand(60, generator=torch.Generator().manual_seed(3)) + 0.5).tolist()

    def smoothed(steps):
        last = [norm**2 for norm in norms[:steps]][-25:]
        weights = [0.16 * 0.84 ** (len(last) - 1 - place) for place in range(len(last))]
        return sum(w * v for w, v in zip(weights, last, strict=True)) / sum(weights)

    delta = 0.1
    said = decisions_of(alone(num_ranks=16, delta=delta), norms)
    changes = [abs(smoothed(step) / smoothed(step - 1) - 1) for step in range(2, len(norms) + 1)]
    assert said == [False] + [change >= delta for change in changes]
    assert 5 < sum(said) < 55


@pytest.mark.parametrize(
    ("norms", "said"),
    [
        ([1.0, math.nan], [False, True]),
        ([math.nan], [True]),
        ([math.inf], [True]),
        ([0.0, 0.0, 0.0], [False, False, False]),
        ([0.0, 1.0], [False, True]),
    ],
)
def test_nan_is_significant_and_zeros_are_not(norms, said):
    assert decisions_of(alone(delta=0.3), map(torch.tensor, norms)) == said


def test_on_a_gpu_ranks_average_two_steps_later_and_with_delta_0_in_each_step(monkeypatch):
    """With stand-ins for the events of a GPU."""
    monkeypatch.setattr(selsync, "LateScalars", lambda on_gpu: LateScalars(on_gpu=True))
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    norms = [1.0, 1.0, 30.0, 30.0, 30.0, 1.0, 1.0]
    late = decisions_of(alone(delta=0.5), norms)
    monkeypatch.undo()
    at_once = decisions_of(alone(delta=0.5), norms)
    assert True in at_once
    assert late == [False, False, *at_once[:-2]]
    monkeypatch.setattr(selsync, "LateScalars", lambda on_gpu: LateScalars(on_gpu=True))
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    assert decisions_of(alone(delta=0), norms) == [True] * len(norms)


def test_unequally_many_values_are_refused_on_all_ranks():
    def work(member):
        sync = SelSync(agree=member, total=member.total)
        with pytest.raises(ValueError, match="leave out shards of tables"):
            sync.average([torch.zeros(3 + (member.rank == 1))])
        return True

    assert all(together(RANKS, work))


def test_parameters_of_any_shape_are_averaged_in_place():
    tensors = [torch.ones(()), torch.ones(2, 3).t(), torch.ones(4, dtype=torch.bfloat16), torch.ones(0)]
    places = [tensor.data_ptr() for tensor in tensors]
    SelSync(agree=Alone(2), total=lambda vector: 3 * vector).average(tensors[:2], tensors[2:])
    assert all((tensor == 1.5).all() for tensor in tensors)
    assert [tensor.data_ptr() for tensor in tensors] == places
