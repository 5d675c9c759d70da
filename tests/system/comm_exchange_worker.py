"""What the four ranks of `test_comm_exchange` do with whole exchanges, and with hooks of DDP models."""

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm.comm.build import Collectives, build_exchange
from dlrm.comm.collectives import keeping
from dlrm.comm.compressors import MSTopK
from dlrm.comm.config import CODECS, COMPRESSORS, CONTROLLERS, EXCHANGES, PLAIN, SPARSE, CommConfig
from dlrm.comm.controllers import Fixed
from dlrm.comm.exchange import Exchange
from dlrm.comm.hook import register
from dlrm.comm.memory import ErrorFeedback, NoMemory
from dlrm.comm.residual import LostResiduals
from dlrm.replicas import Replicas
from dlrm.replicas.apart import Apart
from dlrm.replicas.prioritized import Prioritized

CPU = torch.device("cpu")
SIZE = 203
STEPS = 100
STEPS_OF_PAIRS = 15
PER_NODE = 2
SUMMING = [name for name in EXCHANGES if name not in PLAIN or name == "dense"]


def drawn(size, seed):
    """Another vector on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(size, generator=generator)


def of_all(tensor):
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.contiguous())
    return torch.stack(pieces)


def assert_same_bits(tensor):
    everybody = of_all(tensor.detach().view(torch.int32))
    assert (everybody == everybody[0]).all()


def build(size=SIZE, **options):
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    return build_exchange(CommConfig(**options), size, CPU)


def in_pairs():
    """Few combinations in which each two values of different options meet at least once."""
    values = {
        "exchange": SPARSE,
        "compressor": COMPRESSORS,
        "wire_dtype": CODECS,
        "controller": CONTROLLERS,
        "error_feedback": (True, False),
    }
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    # a threshold says itself how much is sent
    every = [each for each in every if each["compressor"] != "threshold" or each["controller"] == "fixed"]
    left = {pair for each in every for pair in itertools.combinations(each.items(), 2)}
    while left:
        best = max(every, key=lambda each: len(left.intersection(itertools.combinations(each.items(), 2))))
        left.difference_update(itertools.combinations(best.items(), 2))
        threshold = 0.5 if best["compressor"] == "threshold" else 0.0
        yield {**best, "threshold": threshold, "ratio": 0.05, "window_steps": 7}


def by_themselves():
    """Every exchange by default, and sums in other encodings."""
    for exchange in SUMMING:
        yield {"exchange": exchange, "ratio": 0.05}
    for exchange, wire_dtype in (("ring", "int8"), ("tree", "bf16"), ("two_level", "fp16")):
        yield {"exchange": exchange, "wire_dtype": wire_dtype}
        yield {"exchange": exchange, "wire_dtype": wire_dtype, "error_feedback": False}


def owed_by(exchange):
    return exchange.residual.state_dict()["memory"].get("residual", torch.zeros(SIZE)).clone()


def replicas_stay_equal_and_nothing_is_forgotten():
    """SGD towards another target on each rank, so that gradients depend on what was exchanged before."""
    cases = [(options, STEPS) for options in by_themselves()]
    cases += [(options, STEPS_OF_PAIRS) for options in in_pairs()]
    for options, steps in cases:
        exchange = build(**options)
        parameters, target = torch.zeros(SIZE), drawn(SIZE, 1)
        computed = torch.zeros(SIZE, dtype=torch.float64)
        sent = torch.zeros(SIZE, dtype=torch.float64)
        for step in range(steps):
            gradient = (parameters - target) / dist.get_world_size()
            computed += gradient
            total = exchange.sum(gradient)
            sent += total
            parameters = parameters - 0.05 * total
            exchange.observe(0.001 * (1 + step % 3))
        assert_same_bits(parameters)
        figures = exchange.take_figures()
        assert (figures.steps, figures.kept_share <= 1) == (steps, True)
        if not options.get("error_feedback", True):
            assert not owed_by(exchange).any()
            continue
        everything = of_all(computed).sum(0)
        left = everything - sent - of_all(owed_by(exchange).double()).sum(0)
        assert float(left.abs().max()) <= 1e-4 * float(everything.abs().max()), options
        mean = of_all(target).mean(0)
        assert float((parameters - mean).norm() / mean.norm()) < (0.8 if steps == STEPS else 1), options
        assert figures.residual_energy is None or figures.residual_energy > 0


class InTurn:
    """A planner that has another collective for each step."""

    is_settled = True

    def __init__(self, collectives):
        self._collectives, self._step = collectives, 0

    @property
    def chosen(self):
        return self._collectives[self._step % len(self._collectives)]

    def choose(self, gradient):
        chosen = self.chosen
        self._step += 1
        return chosen

    def observe(self, step_s, exchange_s):
        pass

    def state_dict(self):
        return {"step": self._step}

    def load_state_dict(self, state):
        self._step = state["step"]


def collectives_in_turn():
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    make = Collectives("fp32", exact=True, device=CPU, group=None)
    names = (
        ("ring", "fp32"),
        ("all_gather", "fp32"),
        ("ring", "int8"),
        ("star", "fp32"),
        ("hi_topk", "fp32"),
    )
    return [make(*name) for name in names]


def exchange_in_turn(error_feedback):
    collectives = collectives_in_turn()
    memory = (ErrorFeedback if error_feedback else NoMemory)(SIZE, CPU)
    planner = InTurn(collectives)
    return Exchange(
        SIZE, collectives[0], MSTopK(), memory, Fixed(0.1), dense=collectives[0], device=CPU, planner=planner
    )


def what_is_owed_goes_on_from_one_collective_to_the_next():
    """Lossless and lossy ones in turn, a NaN of one rank on its way, and new exchanges from its state on."""
    exchange, num_seen, place = exchange_in_turn(error_feedback=True), 0, 17
    others = torch.arange(SIZE) != place
    computed = sent = torch.zeros(SIZE, dtype=torch.float64)
    for step in range(23):
        gradient = drawn(SIZE, step)
        if step == 8 and dist.get_rank() == 2:  # rank 0 or another chooses for all then
            gradient[place] = float("nan")
        total = exchange.sum(gradient)
        assert_same_bits(total)
        num_seen += int(total[place].isnan())
        assert total[others].isfinite().all()
        computed, sent = computed + gradient, sent + total
        left = of_all(computed).sum(0) - sent - of_all(owed_by(exchange).double()).sum(0)
        assert float(left[others].abs().max()) < 1e-4, step
        if step % 5 == 0:  # in the ring, all that was owed was sent
            assert not owed_by(exchange).any()
        if step in {11, 14}:
            state, residual = exchange.state_dict(), exchange.residual.state_dict()
            exchange = exchange_in_turn(error_feedback=True)
            exchange.load_state_dict(state)
            exchange.residual.load_state_dict(residual)
            assert exchange.settle() is None
    assert num_seen == 1
    assert owed_by(exchange).isfinite().all()


def without_error_feedback_each_step_stands_alone():
    exchange, by_hand = exchange_in_turn(error_feedback=False), collectives_in_turn()
    select = keeping(MSTopK(), round(0.1 * SIZE), SIZE)
    for step in range(13):
        gradient = drawn(SIZE, step)
        if step in {3, 6} and dist.get_rank() == 2:
            gradient[17] = float("nan")
        expected = by_hand[step % len(by_hand)].reduce(gradient.clone(), select)
        torch.testing.assert_close(exchange.sum(gradient), expected, rtol=0, atol=0, equal_nan=True)
        assert not exchange.residual.is_owed
        if step == 6:
            state, exchange = exchange.state_dict(), exchange_in_turn(error_feedback=False)
            exchange.load_state_dict(state)
            assert exchange.settle() is None
            exchange._planner._collectives[3].load_state_dict(by_hand[3].state_dict())


def with_room(exchange, values, num_scalars=0):
    """For `combine`: a gradient, scalars, and the exchange's own places."""
    flat = exchange.make_room(num_scalars)
    flat[: values.numel()] = values
    return flat


def everything_kept_is_dense():
    """To the bit, scalars included, and a mean as well."""
    for exchange in ("dense", *SPARSE):
        for mean in (False, True):
            expected = torch.cat([drawn(SIZE, 2), torch.tensor([0.1, float(dist.get_rank())])])
            made = build(exchange=exchange, ratio=1.0)
            flat = with_room(made, expected, num_scalars=2)
            dist.all_reduce(expected)
            if mean:
                expected /= dist.get_world_size()
            total, scalars = made.combine(flat, num_scalars=2, mean=mean)
            assert torch.equal(total, expected[:SIZE]), exchange
            torch.testing.assert_close(scalars, expected[SIZE:])
            assert exchange != "dense" or torch.equal(scalars, expected[SIZE:])
            assert_same_bits(scalars)


def scalars_arrive_whatever_becomes_of_the_gradient():
    made = build(exchange="all_gather", ratio=0.01, wire_dtype="int8")
    for step in range(5):
        scalars = torch.tensor([1e-30, 3.0 + dist.get_rank(), float("nan")])
        gradient = drawn(SIZE, step)
        _, summed = made.combine(with_room(made, torch.cat([gradient, scalars]), 3), num_scalars=3)
        assert summed[1] == 3.0 * 4 + 6
        assert summed[0] == pytest.approx(4e-30)
        assert summed[2].isnan()


def gradients_that_are_no_numbers_reach_all_and_do_not_stay():
    remembering = [options for options in in_pairs() if options["error_feedback"]]
    for options in (*by_themselves(), *remembering):
        made = build(**options)
        seen = False
        for step in range(2 * dist.get_world_size()):
            gradient = drawn(SIZE, step)
            if step == 1 and dist.get_rank() == 2:
                gradient[17] = float("nan")
            total = made.sum(gradient)
            assert_same_bits(total)
            seen |= bool(total.isnan().any())
        assert seen or options.get("compressor") == "random", options
        zeros = build(**options)
        for _ in range(3):
            assert not zeros.sum(torch.zeros(SIZE)).any()


def what_was_owed_comes_back_is_handed_on_or_counts_as_lost():
    rank = dist.get_rank()
    for compressor in COMPRESSORS[::-1]:
        threshold = 0.5 if compressor == "threshold" else 0.0
        options = {"exchange": "star", "compressor": compressor, "threshold": threshold, "ratio": 0.1}
        made = build(**options)
        for step in range(4):
            made.sum(drawn(SIZE, step))
        state, owed = made.state_dict(), made.residual.state_dict()
        owed = {**owed, "memory": {"residual": owed["memory"]["residual"].clone()}}

        again = build(**options)
        again.load_state_dict(state)
        again.residual.load_state_dict(owed)
        assert again.settle() is None
        for step in range(4, 8):
            assert torch.equal(again.sum(drawn(SIZE, step)), made.sum(drawn(SIZE, step)))

    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, owed)
    handed_on = build(**options)
    handed_on.load_state_dict(state)
    handed_on.residual.inherit(every[rank::2] if rank < 2 else [])
    assert handed_on.settle() is None
    taken = of_all(handed_on.residual.state_dict()["memory"]["residual"])
    torch.testing.assert_close(taken.sum(0), sum(each["memory"]["residual"] for each in every))
    assert not taken[2:].any()

    lossy = build(**options)
    lossy.load_state_dict(state)
    if rank != 3:
        lossy.residual.load_state_dict(owed)
    lost = lossy.settle()
    assert lost == LostResiduals(step=4, ranks=(3,), of_ranks=4, energy_share=lost.energy_share)
    # energies were measured before the second exchange
    first = build(**options)
    first.sum(drawn(SIZE, 0))
    energies = of_all(torch.tensor(first.residual.energy, dtype=torch.float64)).tolist()
    assert lost.energy_share == pytest.approx(energies[3] / sum(energies))
    assert lossy.losses == (lost,)
    lossy.sum(drawn(SIZE, 4))
    going_on = build(exchange="dense")
    going_on.load_state_dict(lossy.state_dict())
    assert going_on.settle().ranks == (0, 1, 2, 3)  # it has no place for what was owed
    assert len(going_on.losses) == 2
    sending = build(exchange="ring")
    sending.load_state_dict(state)
    sending.residual.load_state_dict(owed)
    assert sending.settle() is None
    everything = of_all(owed["memory"]["residual"]).sum(0)
    torch.testing.assert_close(sending.sum(torch.zeros(SIZE)), everything)
    assert not sending.sum(torch.zeros(SIZE)).any()


class Layers(nn.Module):
    """Several buckets; `spare` is used only if asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.spare = nn.Linear(5, 40), nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, inputs, spare):
        hidden = self.first(inputs).relu()
        return self.second(hidden) + (self.spare(hidden) if spare else 0.0)


def samples(sizes, seed):
    """Of all ranks, and this rank's part."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(sizes), 5, generator=generator)
    targets = torch.randn(sum(sizes), 1, generator=generator)
    mine = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
    return inputs, targets, mine


def flat_gradient(module):
    return torch.cat(
        [
            torch.zeros_like(parameter).view(-1) if parameter.grad is None else parameter.grad.view(-1)
            for parameter in module.parameters()
        ]
    )


def ddp(**options):
    return DistributedDataParallel(Layers(), bucket_cap_mb=1e-4, find_unused_parameters=True, **options)


def a_hook_does_what_an_exchange_of_the_whole_gradient_does():
    """Whatever DDP's buckets are, from the first step to those after they were rebuilt; to the bit."""
    for as_view in (False, True):
        for mean in (False, True):
            model, alone = ddp(gradient_as_bucket_view=as_view), Layers()
            hook = register(model, CommConfig(exchange="all_gather", ratio=0.03), mean=mean)
            size = sum(parameter.numel() for parameter in alone.parameters())
            exchange = build(size, exchange="all_gather", ratio=0.03)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
            for step in range(8):
                inputs, targets, mine = samples((4, 4, 4, 4), step)
                spare = step in {0, 4}  # in other steps, what is owed of it is still sent
                for each, optimizer in zip((model, alone), optimizers, strict=True):
                    optimizer.zero_grad()
                    (each(inputs[mine], spare) - targets[mine]).square().mean().backward()
                total, _ = exchange.combine(with_room(exchange, flat_gradient(alone)), mean=mean)
                assert torch.equal(flat_gradient(model), total), (as_view, mean, step)
                for parameter, piece in zip(
                    alone.parameters(), total.split([p.numel() for p in alone.parameters()]), strict=True
                ):
                    parameter.grad = piece.view_as(parameter).clone()
                for optimizer in optimizers:
                    optimizer.step()
                for parameter in model.parameters():
                    assert_same_bits(parameter)
            assert hook.take_figures().steps == 8


def a_hooks_state_goes_on_to_the_bit():
    def steps(model, first, last):
        for step in range(first, last):
            inputs, targets, mine = samples((4, 4, 4, 4), step)
            model.zero_grad()
            (model(inputs[mine], True) - targets[mine]).square().mean().backward()
        return flat_gradient(model)

    config = CommConfig(exchange="hi_topk", ratio=0.05)
    model, other = ddp(), ddp()
    hook, restored = register(model, config), register(other, config)
    steps(model, 0, 3)
    assert restored.load_state_dict(hook.state_dict()) is None
    assert torch.equal(steps(other, 3, 6), steps(model, 3, 6))


def uneven_batches_train_as_one_process_on_all_samples():
    """Losses are scaled once, by a rank's share of all samples, and all is summed; a rank may have none."""
    sizes = (7, 1, 0, 4)
    inputs, targets, mine = samples(sizes, 9)
    for exchange in SUMMING:
        model, alone = ddp(), Layers()
        register(model, CommConfig(exchange=exchange, ratio=1.0), mean=False)
        for _ in range(3):
            for each, part in ((model, mine), (alone, slice(None))):
                each.zero_grad()
                (each(inputs[part], True) - targets[part]).square().sum().div(sum(sizes)).backward()
                with torch.no_grad():
                    for parameter in each.parameters():
                        parameter.sub_(0.1 * parameter.grad)
            torch.testing.assert_close(
                flat_gradient(model), flat_gradient(alone), rtol=1e-5, atol=1e-6, msg=exchange
            )


class Stepping:
    """What `Prioritized` and the loop below need of `Optimizers`."""

    def __init__(self, parameters):
        self.dense = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.step_dense = self.dense.step


def trained(make_kept, steps=6):
    """Layers after some steps on other samples on each rank, and whoever kept them alike."""
    model = Layers()
    optimizers = Stepping(list(model.parameters()))
    kept = make_kept(model, optimizers)
    for step in range(steps):
        inputs, targets, mine = samples((4, 4, 4, 4), step)
        optimizers.dense.zero_grad()
        loss = (model(inputs[mine], step % 2 == 0) - targets[mine]).square().mean()
        loss.backward()
        told = torch.stack([loss.detach(), torch.tensor(float(dist.get_rank() == 1))])
        mean_loss, wish = kept.average(told).tolist()
        assert mean_loss > 0
        assert wish == 0.25
        optimizers.step_dense()
        kept.updated(0.01)
    return model, optimizers, kept


def all_ways_to_keep_replicas_alike():
    dense, _, _ = trained(lambda model, _: Replicas(list(model.parameters()), 2))
    together = flat_values(dense)
    assert_same_bits(together)

    model, _, kept = trained(lambda model, optimizers: Prioritized(model, optimizers, reads_each_step=False))
    kept.join()
    torch.testing.assert_close(flat_values(model), together)
    figures = kept.take_figures()
    assert figures.steps == 6
    assert figures.sent_bytes == 1.5 * 4 * together.numel()
    kept.close()

    model, _, kept = trained(apart(change=0.0))
    torch.testing.assert_close(flat_values(model), together)
    model, _, kept = trained(apart(change=0.0), STEPS)
    assert_same_bits(flat_values(model))
    assert kept.take_figures().kept_share == 1

    model, _, kept = trained(apart(change=0.05), STEPS)
    assert 0 < kept.take_figures().kept_share < 1
    kept.join()
    assert_same_bits(flat_values(model))

    model, optimizers, kept = trained(apart(change=1e9, save_every_steps=5))
    mine = flat_values(model)
    assert not torch.equal(of_all(mine)[0], of_all(mine)[1])
    figures = kept.take_figures()
    assert figures.kept_share == pytest.approx(1 / 6)
    num_exchanged = 2 * mine.numel() / 6 + 1  # with momentum, in one of the steps; and a flag in each
    assert figures.sent_bytes == pytest.approx(1.5 * 4 * num_exchanged)
    state = kept.state_dict()
    other = apart(change=1e9)(model, optimizers)  # as after a failure, with live parameters
    other.load_state_dict(state, steps_done=6)
    assert other.settle() is None
    torch.testing.assert_close(flat_values(model), of_all(mine).mean(0))
    assert_same_bits(flat_values(model))


def apart(change, save_every_steps=0):
    def work(model, optimizers):
        return Apart(list(model.parameters()), optimizers.dense, change, save_every_steps)

    return work


def flat_values(module):
    return torch.cat([parameter.detach().view(-1) for parameter in module.parameters()])
