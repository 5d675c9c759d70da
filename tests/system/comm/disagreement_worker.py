"""Checks that all four ranks raise when one of them fails, or is about to do something else."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm.comm.config import CONTROLLERS, SPARSE, CommConfig
from dlrm.comm.consistency import DisagreementError
from dlrm.comm.ddp_hook import register
from dlrm.comm.p3.scheduler import PriorityExchange
from dlrm.config.schema import Config, TrainConfig
from dlrm.dense_sync.allreduce import AllReduceSync
from dlrm.training.run import check_agreed
from tests.system.comm.common import (
    SIZE,
    SUMMING,
    Layers,
    assert_same_bits,
    buffer_of,
    build,
    ddp,
    drawn,
    of_all,
    residual_of,
    sum_of,
)


def reports_rank(rank, how, own=DisagreementError):
    """All ranks raise `DisagreementError`; the failed rank may raise its own error."""
    return pytest.raises(own if dist.get_rank() == rank else DisagreementError, match=how)


def check_a_failed_rank_is_reported_by_all():
    """In every exchange; after repeating the step, nothing is lost."""
    rank = dist.get_rank()
    for exchange in SUMMING:
        made = build(exchange=exchange, ratio=0.1)
        computed = sent = torch.zeros(SIZE, dtype=torch.float64)
        for step in range(4):
            gradient, residual = drawn(SIZE, step), residual_of(made)
            with reports_rank(1, f"this exchange is for fp32|rank 1 .* exchange {step + 1}:", ValueError):
                sum_of(made, torch.ones(SIZE + (rank == 1)))
            with reports_rank(2, f"^'mine'|rank 2 .* exchange {step + 1}:", KeyError):
                made.combine(
                    buffer_of(made, gradient), mean=True, problem=KeyError("mine") if rank == 2 else None
                )
            assert torch.equal(residual_of(made), residual), exchange
            total = sum_of(made, gradient)
            assert_same_bits(total)
            computed, sent = computed + gradient, sent + total
        assert made.steps_done == 4
        left = of_all(computed).sum(0) - sent - of_all(residual_of(made).double()).sum(0)
        assert float(left.abs().max()) < 1e-4, exchange
    several = build(exchange="dense")
    with pytest.raises((DisagreementError, KeyError), match=r"2 ranks cannot|mine"):
        several.combine(several.make_buffer(), problem=KeyError("mine") if rank % 2 else None)


def check_a_rank_that_fails_when_candidates_are_timed_is_reported_by_all():
    """A failed rank times collectives on zeros."""
    made = build(exchange="auto", ratio=0.1)
    for step in range(10):
        sum_of(made, drawn(SIZE, step))
        made.observe(0.01)
    with reports_rank(3, "this exchange is for fp32|rank 3 cannot take part in exchange 11", ValueError):
        sum_of(made, torch.ones(SIZE - 3 * (dist.get_rank() == 3)))
    for step in range(3):
        assert_same_bits(sum_of(made, drawn(SIZE, step)))
        made.observe(0.01)


def check_a_rank_in_another_state_is_reported_by_all():
    """The preflight comes before controller and collective."""
    rank = dist.get_rank()
    for exchange in SPARSE:
        made = build(exchange=exchange, ratio=0.2 if rank == 3 else 0.1)
        with pytest.raises(DisagreementError, match=r"rank 0 is at exchange 1 of 203 values.*rank 3 is at"):
            sum_of(made, torch.ones(SIZE))

        made = build(exchange=exchange)
        if rank == 2:
            made.load_state_dict({**made.state_dict(), "steps_done": 7})
        with pytest.raises(DisagreementError, match="rank 2 is at exchange 8"):
            sum_of(made, torch.ones(SIZE))

        for controller in CONTROLLERS[1:]:
            made = build(exchange=exchange, controller=controller, window_steps=7)
            for step in range(5):
                sum_of(made, drawn(SIZE, step))
                made.observe(0.01)
            if rank == 2:
                made.load_state_dict(made.state_dict())  # only this rank's window starts over
            with pytest.raises(DisagreementError, match="rank 2 is at exchange 6"):
                sum_of(made, drawn(SIZE, 5))
    made = build(exchange="star")
    if rank == 1:  # which would wait for the indices of rank 3
        made.load_state_dict({**made.state_dict(), "parts": {"ARTopK": {"step": 3}}})
    with pytest.raises(DisagreementError, match="rank 1 is at exchange 1"):
        sum_of(made, torch.ones(SIZE))
    made = build(exchange="all_gather", ratio=1.0)  # no message of the above is left
    assert torch.equal(sum_of(made, torch.ones(SIZE)), torch.full((SIZE,), 4.0))


def check_different_restored_states_are_reported_by_all():
    """Before the first exchange, as lossless ones have no preflight."""
    rank = dist.get_rank()
    for exchange in (*SUMMING, "auto"):
        made = build(exchange=exchange)
        if rank == 2:
            made.load_state_dict({**made.state_dict(), "steps_done": 7})
        with pytest.raises(
            DisagreementError, match=r"rank 0 has done 0 .*rank 2 has done 7 exchanges of 203"
        ):
            made.settle()
    made = build(exchange="auto")
    settled = {**made.state_dict()["planner"], "chosen": "tree fp32", "usual_s": 0.1}
    if rank == 1:  # which would not measure links with the others
        made.load_state_dict({**made.state_dict(), "planner": settled})
    with pytest.raises(DisagreementError, match=r"rank 1 has done 0 .* continues by \('tree"):
        made.settle()


class Bucket:
    """A stand-in for DDP's `GradBucket`."""

    def __init__(self, model, number, last):
        self._parameters, self._number, self._last = list(model.module.parameters()), number, last

    def index(self):
        return self._number

    def is_last(self):
        return self._last

    def parameters(self):
        return self._parameters

    def gradients(self):
        return [torch.ones_like(parameter) for parameter in self._parameters]

    def buffer(self):
        return torch.zeros(1)


def check_buckets_in_a_wrong_order_are_refused():
    rank = dist.get_rank()
    for exchange in SUMMING:
        model = ddp()
        hook = register(model, CommConfig(exchange=exchange))
        with reports_rank(2, r"bucket 1 .* due|rank 2 cannot", RuntimeError):
            hook.take(Bucket(model, number=1 if rank == 2 else 0, last=True))
        hook.take(Bucket(model, number=0, last=True))  # the next step works
        assert hook.exchange.steps_done == 1

    module = Layers()
    if rank == 1:
        module.second = nn.Linear(40, 1, bias=False)
    with pytest.raises(ValueError, match="rank 1"):
        register(Unlike(module), CommConfig(exchange="all_gather"))


def check_different_models_or_options_are_refused_by_all():
    rank = dist.get_rank()
    shape = (2, 3) if rank == 2 else (3, 2)  # as many values
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(shape))]
    with pytest.raises(ValueError, match=r"rank 2 .* parameter 1 .* \[2, 3\], and rank 0 .* \[3, 2\]"):
        AllReduceSync(parameters, num_scalars=1)
    config = CommConfig(exchange="all_gather" if rank == 1 else "ring")
    with pytest.raises(ValueError, match=r"rank 1 would exchange gradients by .*'all_gather'.* same options"):
        AllReduceSync([nn.Parameter(torch.zeros(4))], num_scalars=1, comm=config)
    model = ddp()
    with pytest.raises(ValueError, match=r"rank 3 .* by .*'sum'\), and rank 0 by .*'mean'\)"):
        register(model, CommConfig(), mean=rank != 3)
    dtype = torch.bfloat16 if rank == 1 else torch.float32
    with pytest.raises(ValueError, match=r"rank 1 .*bfloat16"):
        register(Unlike(nn.Linear(2, 2, dtype=dtype)), CommConfig())


def check_different_configurations_are_refused_by_all():
    config = Config(train=TrainConfig(seed=7 if dist.get_rank() == 3 else 0))
    with pytest.raises(ValueError, match=r"rank 3 was started with train.seed=7, and rank 0 .*=0"):
        check_agreed(config)


def check_different_slices_are_refused_by_all():
    rank, model = dist.get_rank(), Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"rank 2 would exchange gradients by .* same options"):
        PriorityExchange(model, optimizer, slice_values=100 if rank == 2 else 200)
    others = Layers() if rank == 1 else model
    with pytest.raises(ValueError, match=r"rank 1 cannot|are the model's"):
        PriorityExchange(others, optimizer)


class Unlike(DistributedDataParallel):
    """A DDP model that DDP itself would have refused."""

    parameters_to_ignore = frozenset()
    gradient_as_bucket_view = False

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.process_group = module, dist.group.WORLD
