"""Checks of dense synchronization between four ranks."""

import pytest
import torch
import torch.distributed as dist

from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.delayed import DelayedSync
from dlrm.dense_sync.p3 import P3Sync
from dlrm.dense_sync.selective import SelectiveSync
from tests.system.comm.common import STEPS, Layers, assert_same_bits, flat_gradient, of_all, samples


class Stepping:
    """A stand-in for `Optimizers`."""

    def __init__(self, parameters):
        self.dense = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.step_dense = self.dense.step


def trained(make_kept, steps=6):
    """Train layers on other samples on each rank; returns model, optimizer and synchronization."""
    model = Layers()
    optimizers = Stepping(list(model.parameters()))
    kept = make_kept(model, optimizers)
    for step in range(steps):
        inputs, targets, mine = samples((4, 4, 4, 4), step)
        optimizers.dense.zero_grad()
        loss = (model(inputs[mine], step % 2 == 0) - targets[mine]).square().mean()
        loss.backward()
        scalars = torch.stack([loss.detach(), torch.tensor(float(dist.get_rank() == 1))])
        mean_loss, share = kept.average(scalars).tolist()
        assert mean_loss > 0
        assert share == 0.25
        optimizers.step_dense()
        kept.updated(0.01)
    return model, optimizers, kept


def apart(change, save_every_steps=0):
    def work(model, optimizers):
        return SelectiveSync(list(model.parameters()), optimizers.dense, change, save_every_steps)

    return work


def flat_values(module):
    return torch.cat([parameter.detach().view(-1) for parameter in module.parameters()])


def averaged():
    """Parameters of replicas whose gradients are averaged in each step."""
    model, _, _ = trained(lambda model, _: AllReduceSync(list(model.parameters()), 2))
    return flat_values(model)


def check_p3_equals_averaging_gradients():
    model, _, kept = trained(lambda model, optimizers: P3Sync(model, optimizers, reads_each_step=False))
    kept.join()
    expected = averaged()
    assert_same_bits(expected)
    torch.testing.assert_close(flat_values(model), expected)
    figures = kept.take_figures()
    assert figures.steps == 6
    assert figures.sent_bytes == 1.5 * 4 * expected.numel()
    kept.close()


def check_late_gradients_equal_those_of_one_process_with_all_samples():
    model, _, kept = trained(lambda model, _: DelayedSync(list(model.parameters())))
    assert_same_bits(flat_values(model))
    figures = kept.take_figures()
    assert figures.steps == 6
    assert figures.sent_bytes == 1.5 * 4 * flat_values(model).numel()

    alone = Layers()
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    late = None
    for step in range(6):
        inputs, targets, _ = samples((4, 4, 4, 4), step)
        loss = (alone(inputs, step % 2 == 0) - targets).square().mean()
        present = torch.autograd.grad(loss, list(alone.parameters()), materialize_grads=True)
        if late:
            for parameter, gradient in zip(alone.parameters(), late, strict=True):
                parameter.grad = gradient
            sgd.step()
        late = present
    torch.testing.assert_close(flat_values(model), flat_values(alone))
    (own,) = kept.own.state_dict()["gradients"]
    expected = torch.cat([each.view(-1) for each in late])
    torch.testing.assert_close(of_all(own).mean(0), expected, atol=1e-6, rtol=1e-5)

    other = DelayedSync(list(model.parameters()))  # of a resumed run in which rank 2 has lost its part
    other.load_state_dict(kept.state_dict(), steps_done=6)
    other.own.inherit([kept.own.state_dict()] if dist.get_rank() != 2 else [])
    assert other.settle().ranks == (2,)
    other.average(torch.zeros(2))
    assert_same_bits(flat_gradient(model))
    torch.testing.assert_close(flat_gradient(model), of_all(own)[[0, 1, 3]].mean(0))


def check_selsync_in_each_step_equals_averaging_gradients():
    model, _, _ = trained(apart(change=0.0))
    torch.testing.assert_close(flat_values(model), averaged())
    model, _, kept = trained(apart(change=0.0), STEPS)
    assert_same_bits(flat_values(model))
    assert kept.take_figures().kept_share == 1


def check_selsync_replicas_are_averaged_after_a_failure():
    model, optimizers, kept = trained(apart(change=1e9, save_every_steps=5))
    mine = flat_values(model)
    assert not torch.equal(of_all(mine)[0], of_all(mine)[1])
    figures = kept.take_figures()
    assert figures.kept_share == pytest.approx(1 / 6)
    num_exchanged = 2 * mine.numel() / 6 + 1  # with momentum, in one of the steps; and a flag in each
    assert figures.sent_bytes == pytest.approx(1.5 * 4 * num_exchanged)
    state = kept.state_dict()
    other = apart(change=1e9)(model, optimizers)  # with live parameters
    other.load_state_dict(state, steps_done=6)
    assert other.settle() is None
    torch.testing.assert_close(flat_values(model), of_all(mine).mean(0))
    assert_same_bits(flat_values(model))
