"""Workers of `test_pipeline`: what a schedule trains, against one part of a step after the other."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards
from dlrm.config.schema import DenseConfig, ScheduleConfig, TrainConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.optim.build import Optimizers
from dlrm.pipeline.build import make_schedule
from dlrm.pipeline.halves import half_sizes, parts_of
from dlrm.pipeline.schedules import Plain, Prefetch, PrefetchIds, Waves
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.build import make_dense_sync
from dlrm.training.evaluation import evaluate
from dlrm.training.trainer import NUM_SCALARS
from tests.dlrm.training.test_exactness import PlainDLRM
from tests.system.sharding import test_exactness as exact
from tests.system.sharding.test_exactness import Case

NUM_STEPS = 12
INTERRUPTED = {3: 1, 4: 0, 8: 1}
"""Batches that are known after some steps, as at the end of an epoch; evaluation follows."""
PREFETCHED = {
    Case("dlrm", "sgd", "sgd"): [True],
    Case("dlrm", "adagrad", "sgd", precision="bf16"): [True],
    Case("dcnv2", "rowwise_adagrad", "sgd", is_weighted=True, is_uneven=True): [True],
    Case("deepfm", "sgd", "adagrad"): [True, True],
    Case("fm", "rowwise_adagrad", "adagrad", num_dense=2, cut="row_wise"): [True, True],
    # of these only the ids travel early
    Case("deepfm", "sgd", "sgd", num_dense=0, is_weighted=True, strategy="des", is_uneven=True): [
        False,
        False,
    ],
    Case("dlrm", "sgd", "sgd", dynamic=("cat_4",)): [True],
}
"""Whether embeddings of each collection can be sent early, by case."""


def train(case, make_schedule):
    """Losses, logits, dense parameters, and the tables and their optimizer states."""
    model, config = exact.sharded_model(case)
    optimizers = Optimizers(
        model, DenseConfig(optimizer=case.dense, learning_rate=0.05), config.tables, ScheduleConfig()
    )
    parameters = dense_parameters(model)
    replicas = AllReduceSync(parameters, num_scalars=1)
    schedule = make_schedule(model)
    batches = [exact.my_part(case, step % exact.NUM_BATCHES, exact.GLOBAL_BATCH) for step in range(NUM_STEPS)]
    found = []
    for step, batch in enumerate(batches):
        known = batches[step + 1 :][: INTERRUPTED.get(step, NUM_STEPS)]
        optimizers.begin_step(step)
        passed = schedule.step(batch, lambda count, known=known: known[:count])
        found += [replicas.average(passed.loss.detach().view(1)).clone(), passed.logits.detach()]
        optimizers.step()
        if step in INTERRUPTED:
            evaluate(model, [exact.my_part(case, 1000, exact.TEST_SAMPLES)], exact.CPU)
    found += [parameter.detach().clone() for parameter in parameters]
    for shard in find_shards(model, optimizers.table_optimizers):
        found += [shard.weights.clone(), *(state.clone() for state in shard.optimizer_state.values())]
    return found, schedule


def check_prefetch():
    for case, are_early in PREFETCHED.items():
        wanted, _ = train(case, Plain)
        found, schedule = train(case, Prefetch)
        assert [each.is_early for each in schedule.collections] == are_early, case
        if case.strategy == "des":
            found, _ = train(case, PrefetchIds)
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert torch.equal(one, other), (case, number, (one - other).abs().max())
    found, _ = train(next(iter(PREFETCHED)), lambda model: Prefetch(model, late_rows="stale"))
    wanted, _ = train(next(iter(PREFETCHED)), Plain)
    assert not all(map(torch.equal, wanted, found)), "the batches share rows: corrections must matter"


HALVED = (
    Case("dlrm", "sgd", "sgd"),
    Case("dlrm", "adagrad", "sgd", is_weighted=True),
    Case("deepfm", "rowwise_adagrad", "adagrad", cut="row_wise"),
    Case("fm", "sgd", "sgd", num_dense=2, dynamic=("cat_4",)),
)


def check_waves():
    for case in HALVED:
        wanted, _ = train(case, Plain)
        found, _ = train(case, Waves)
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            error = (one - other).abs().max()
            assert error <= exact.ATOL[case.tables], (case, number, error)
        assert not all(map(torch.equal, wanted, found)), "sums over halves round otherwise"


def check_refusals():
    model, _ = exact.sharded_model(Case("deepfm", "sgd", "sgd", strategy="des"))
    with pytest.raises(ValueError, match=r"waves exchanges pooled embeddings .*choose prefetch"):
        Waves(model)


LATE = Case("dlrm", "sgd", "sgd", rate=5.0)
"""Tables learn so fast that rows without their last update make a difference."""
FRESH = ("cat_0", "cat_1")
"""Replicated tables, which every rank looks up in its own memory: they are never late."""
RATE = 0.05


class Simulator:
    """One process that trains on the batches of all ranks, with plain PyTorch and rules of its own."""

    def __init__(self, model):
        pieces = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, exact.pieces_of(model))
        tables = exact.put_together(chain(*pieces))
        self.plain = PlainDLRM(model.module, tables)
        self.before, self.older = dict(tables), dict(tables)
        """Tables without their last update, and without the last two."""
        self.predicts, self.read_before = False, {}
        """Whether rows are predicted, and by table those that the batch before reads."""

    @property
    def tables(self):
        return {name: bag.weight.detach().clone() for name, bag in self.plain.bags.items()}

    @property
    def dense(self):
        return [each for name, each in self.plain.named_parameters() if not name.startswith("bags.")]

    def gradients(self, samples, is_late, share=1.0):
        """Of tables by name and of dense parameters, at rows that may lack their last update."""
        now = self.tables
        for name, bag in self.plain.bags.items():
            if is_late and name not in FRESH:
                bag.weight.data.copy_(self.before[name])
                if self.predicts:
                    again = self.read_before[name].unique()
                    bag.weight.data[again] += self.before[name][again] - self.older[name][again]
        self.read_before = {name: samples[1][name].values() for name in now}
        self.plain.zero_grad()
        dense, sparse, labels = samples
        (share * binary_cross_entropy_with_logits(self.plain(dense, sparse), labels)).backward()
        of_tables = {name: bag.weight.grad.clone() for name, bag in self.plain.bags.items()}
        for name, bag in self.plain.bags.items():
            bag.weight.data.copy_(now[name])
        return of_tables, [each.grad.clone() for each in self.dense]

    def update_tables(self, gradients, names):
        self.older |= {name: self.before[name] for name in names}
        self.before |= {name: self.tables[name] for name in names}
        for name in names:
            self.plain.bags[name].weight.data.sub_(LATE.rate * gradients[name])


def samples_of_all(batches):
    """The samples of all ranks' batches, in the order of ranks."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, batches)
    keys = found[0].sparse.keys()
    bags = [each.sparse[key] for key in keys for each in found]
    sparse = KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([bag.values() for bag in bags]),
        lengths=torch.cat([bag.lengths() for bag in bags]),
    )
    return torch.cat([each.dense for each in found]), sparse, torch.cat([each.labels for each in found])


def train_late(train_config, step_of_simulator):
    """Train with a schedule and with a simulator of its rule; compare tables and first dense weights."""
    model, config = exact.sharded_model(LATE, train=train_config)
    simulator = Simulator(model)
    optimizers = Optimizers(
        model, DenseConfig(optimizer="sgd", learning_rate=RATE), config.tables, ScheduleConfig()
    )
    replicas, schedule = make_dense_sync(config, model, optimizers), make_schedule(config.train, model)
    batches = [exact.my_part(LATE, step % exact.NUM_BATCHES, exact.GLOBAL_BATCH) for step in range(NUM_STEPS)]
    for step, batch in enumerate(batches):
        optimizers.begin_step(step)
        schedule.step(batch, lambda count, step=step: batches[step + 1 :][:count])
        replicas.average(torch.zeros(NUM_SCALARS))
        optimizers.step()
        step_of_simulator(simulator, step, batch)
    pieces = [None] * dist.get_world_size()
    dist.all_gather_object(pieces, exact.pieces_of(model))
    found, wanted = exact.put_together(chain(*pieces)), simulator.tables
    for name, table in found.items():
        torch.testing.assert_close(table, wanted[name], rtol=0, atol=3e-6, msg=name)
    layers = [*model.module.bottom, *model.module.top.hidden, model.module.top.logit]
    theirs = [*simulator.plain.bottom, *simulator.plain.top]
    for ours, other in zip(layers, theirs, strict=True):
        torch.testing.assert_close(ours.weight, other.weight, rtol=0, atol=3e-6)
    return replicas


def check_delayed(late_rows):
    pending = []

    def step(simulator, number, batch):
        simulator.predicts = late_rows == "predicted"
        # the first batch shows what can work ahead, and the second one is the first to be announced
        of_tables, of_dense = simulator.gradients(samples_of_all(batch), is_late=number > 1)
        simulator.update_tables(of_tables, list(of_tables))
        pending.append(of_dense)
        if len(pending) > 1:
            for parameter, gradient in zip(simulator.dense, pending.pop(0), strict=True):
                parameter.data.sub_(RATE * gradient)

    train_late(TrainConfig(precision="fp32", pipeline="delayed", late_rows=late_rows), step).join()


def check_tick_tock():
    last, others = [], []
    """Gradients of the wave before, and the second replica's dense parameters."""

    def step(simulator, number, batch):
        others.extend([] if others else [each.detach().clone() for each in simulator.dense])
        own = [each.detach().clone() for each in simulator.dense]
        replicas, gradients, of_small = [own, others], [], []
        for wave, half in enumerate(parts_of(batch, half_sizes(batch.labels.numel()))):
            for parameter, value in zip(simulator.dense, replicas[wave], strict=True):
                parameter.data.copy_(value)
            is_late = 2 * number + wave > 1
            of_tables, of_dense = simulator.gradients(samples_of_all(half), is_late, share=0.5)
            simulator.update_tables(of_tables, [name for name in of_tables if name not in FRESH])
            of_small.append(of_tables)
            gradients.append(of_dense)
        for name in FRESH:
            simulator.update_tables({name: sum(each[name] for each in of_small)}, [name])
        before = last.pop() if last else gradients[0]
        for values, one, other in ((own, gradients[0], before), (others, gradients[1], gradients[0])):
            for value, first, second in zip(values, one, other, strict=True):
                value.sub_(RATE * (first + second))
        for parameter, value in zip(simulator.dense, own, strict=True):
            parameter.data.copy_(value)
        last.append(gradients[1])

    train_late(TrainConfig(precision="fp32", pipeline="waves", wave_updates="tick_tock"), step)
