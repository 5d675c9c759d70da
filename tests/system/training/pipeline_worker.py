"""Workers of `test_pipeline`: what a schedule trains, against one part of a step after the other."""

import pytest
import torch

from cpr.shards import find_shards
from dlrm.config.schema import DenseConfig, ScheduleConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.optim.build import Optimizers
from dlrm.pipeline.schedules import Plain, Prefetch, Waves
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.evaluation import evaluate
from tests.system.sharding import test_exactness as exact
from tests.system.sharding.test_exactness import Case

NUM_STEPS = 12
INTERRUPTED = {3: 1, 4: 0, 8: 1}
"""Batches that are known after some steps, as at the end of an epoch; evaluation follows."""
PREFETCHED = {
    Case("dlrm", "sgd", "sgd"): [True],
    Case("dlrm", "adagrad", "sgd", precision="bf16"): [True],
    Case("dcnv2", "rowwise_adagrad", "sgd", is_weighted=True): [True],
    Case("deepfm", "sgd", "adagrad"): [True, True],
    Case("fm", "rowwise_adagrad", "adagrad", num_dense=2, cut="row_wise"): [True, True],
    # of these only the ids travel early
    Case("deepfm", "sgd", "sgd", num_dense=0, is_weighted=True, strategy="des"): [False, False],
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
        assert [each.is_early for each in schedule.ahead] == are_early, case
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert torch.equal(one, other), (case, number, (one - other).abs().max())
    found, _ = train(next(iter(PREFETCHED)), lambda model: Prefetch(model, corrected=False))
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
