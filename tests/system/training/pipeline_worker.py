"""Workers of `test_pipeline`: what a schedule trains, against the steps one after the other."""

from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist

from cpr.shards import find_shards
from dlrm.config.schema import Config, DenseConfig, ModelConfig, ScheduleConfig, ShardingConfig, TablesConfig
from dlrm.config.schema import TrainConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.optim.build import Optimizers
from dlrm.pipeline.schedules import Prefetch, make_schedule
from dlrm.sharding.parameters import dense_parameters
from dlrm.training import build
from tests.dlrm.inputs import fake_inputs
from tests.system.sharding import test_exactness as exact
from tests.system.sharding.test_exactness import CASES, FEATURES, Case, my_part

NUM_STEPS = 12
EARLY = {  # cases with tables whose embeddings can be sent early, and with those of which only ids can
    Case("dlrm", "sgd", "sgd"): True,
}
ONE_HOT = [replace(each) for each in FEATURES]


def train(case, schedule, precision="fp32", dynamic=(), holes=()):
    torch.manual_seed(7)
    model, config = exact.sharded_model(case)
    optimizers = Optimizers(
        model, DenseConfig(optimizer=case.dense, learning_rate=0.05), config.tables, ScheduleConfig()
    )
    parameters = dense_parameters(model)
    replicas = AllReduceSync(parameters, num_scalars=1)
    schedule = make_schedule(schedule, model)
    batches = [my_part(case, step % exact.NUM_BATCHES, exact.GLOBAL_BATCH) for step in range(NUM_STEPS)]
    losses, logits = [], []
    for step, batch in enumerate(batches):
        optimizers.begin_step(step)

        def upcoming(count, step=step):
            return batches[step + 1 : step + 1 + count]

        passed = schedule.step(batch, upcoming)
        losses.append(replicas.average(passed.loss.detach().view(1)).item())
        logits.append(passed.logits.detach())
        optimizers.step()
        if step in holes:
            exact.evaluate(model, [my_part(case, 1000, exact.TEST_SAMPLES)], exact.CPU)
    states = [
        tensor.clone()
        for shard in find_shards(model, optimizers.table_optimizers)
        for tensor in (shard.weights, *shard.optimizer_state.values())
    ]
    if isinstance(schedule, Prefetch):
        print(case, [each.is_early for each in schedule._ahead])
    return [torch.tensor(losses), *logits, *(each.detach().clone() for each in parameters), *states]


def check_prefetch():
    for case in CASES:
        wanted, found = train(case, "none"), train(case, "prefetch", holes={3, 4})
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            assert torch.equal(one, other), (case, number, (one - other).abs().max())
