"""The learning rate over time, and that every optimizer moves what it owns and nothing else."""

from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode

from cpr.shards import table_groups
from dlrm.config.schema import DENSE_OPTIMIZERS, DenseConfig, ScheduleConfig, TablesConfig
from dlrm.config.table_optimizers import ROW_OPTIMIZERS
from dlrm.optim.build import Optimizers, ReplicatedTables, _dense_optimizer, schedule_factor
from dlrm.optim.norms import local_norms
from dlrm.sharding.parameters import dense_parameters

KINDS = {"cat_0": "data_parallel", "cat_1": "data_parallel", "cat_2": "column_wise", "cat_3": "table_wise"}


STEPPED = ScheduleConfig(warmup_steps=4, decay_start_step=10, decay_steps=10)
LINEAR = ScheduleConfig(decay_steps=10, power=1.0)


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        (STEPPED, {0: 0.25, 3: 1.0, 4: 1.0, 10: 1.0, 11: 0.9**2, 19: 0.1**2, 20: 0.0}),
        (LINEAR, {0: 1.0, 5: 0.5, 10: 0.0}),
        (ScheduleConfig(), {0: 1.0, 1: 1.0, 10**9: 1.0}),
    ],
    ids=["warm-up and decay", "power 1", "constant"],
)
def test_schedule_warms_up_stays_and_decays(config, factors):
    assert {step: schedule_factor(config, step) for step in factors} == pytest.approx(factors, abs=1e-12)


def fused_rates(model):
    modules = [group.emb_module for group in table_groups(model)]
    return [tbe.get_learning_rate() for tbe in modules if hasattr(tbe, "get_learning_rate")]


def test_all_optimizers_follow_one_schedule(shard_model):
    model = shard_model(KINDS)
    schedule = ScheduleConfig(warmup_steps=4, decay_start_step=4, decay_steps=2, power=1.0)
    optimizers = Optimizers(model, DenseConfig(learning_rate=0.4), TablesConfig(learning_rate=0.8), schedule)
    for step, factor in enumerate([0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.0, 0.0]):
        optimizers.begin_step(step)
        assert optimizers.learning_rates == pytest.approx({"dense": 0.4 * factor, "tables": 0.8 * factor})
        assert fused_rates(model)
        assert fused_rates(model) == pytest.approx([0.8 * factor] * len(fused_rates(model)))
        groups = optimizers.dense.param_groups + optimizers._replicated.optimizer.param_groups
        assert [group["lr"] for group in groups] == pytest.approx([0.4 * factor, 0.8 * factor])


class Operators(TorchDispatchMode):
    """Records the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name())
        return operator(*args, **(kwargs or {}))


def test_on_a_gpu_dense_optimizers_update_all_parameters_together():
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.zeros(3, 2, device="cuda")) for _ in range(4)]
        for each in parameters:
            each.grad = torch.zeros_like(each)
        adagrad = _dense_optimizer(parameters, DenseConfig(optimizer="adagrad"), local_norms)
        with Operators() as ran:
            adagrad.step()
    assert "aten::_foreach_addcdiv_.Scalar" in ran.names
    assert "aten::addcdiv_" not in ran.names
    for name in ("sgd", "adam"):
        (group,) = _dense_optimizer(parameters, DenseConfig(optimizer=name), local_norms).param_groups
        assert group["fused"], name


def test_replicated_tables_are_one_tall_table_and_no_dense_parameters(shard_model):
    model = shard_model(KINDS)
    (tall,) = ReplicatedTables(model, TablesConfig()).optimizer.param_groups[0]["params"]
    assert tall.shape == (50 + 7, 8)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("embedding_bags" not in names[id(parameter)] for parameter in dense_parameters(model))
    assert len(dense_parameters(model)) == 8  # two layers at the bottom and two on top


@pytest.mark.system
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tables", "dense"), list(product(ROW_OPTIMIZERS, DENSE_OPTIMIZERS)), ids=lambda value: value
)
def test_all_combinations_learn(tables, dense, precision, shard_model, whole_tables, make_batch):
    """Every table and every dense parameter moves, rows that were not read do not, and the loss falls."""
    config = TablesConfig(optimizer=tables, learning_rate=0.05)
    model = shard_model(KINDS, tables=config, precision=precision)
    optimizers = Optimizers(model, DenseConfig(optimizer=dense, learning_rate=0.05), config, ScheduleConfig())
    batch = make_batch(16, seed=1)
    tables_before = whole_tables(model)
    dense_before = [parameter.detach().clone() for parameter in dense_parameters(model)]
    losses = []
    for step in range(10):
        optimizers.begin_step(step)
        loss = binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
        loss.backward()
        optimizers.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, after in whole_tables(model).items():
        read = torch.zeros(after.shape[0], dtype=torch.bool)
        read[batch.sparse[name].values()] = True
        moved = (after != tables_before[name]).any(1)
        assert moved[read].any(), name
        assert not moved[~read].any(), name
        assert after.isfinite().all(), name
    for before, parameter in zip(dense_before, dense_parameters(model), strict=True):
        assert not torch.equal(before, parameter)


def step_once(model, dense, make_batch):
    """The dense parameters before and after a step in which a plain SGD of rate 1 would move them far."""
    optimizers = Optimizers(model, dense, TablesConfig(), ScheduleConfig())
    before = [parameter.detach().clone() for parameter in dense_parameters(model)]
    batch = make_batch(16, seed=1)
    optimizers.begin_step(0)
    (model(batch.dense, batch.sparse) * 100).sum().backward()
    optimizers.step()
    return before, [parameter.detach() for parameter in dense_parameters(model)]


def test_clipping_limits_the_norm_of_all_dense_parameters_together_and_leaves_tables_alone(
    shard_model, whole_tables, make_batch
):
    tables = []
    for clip_norm in (0.0, 0.25):
        model = shard_model(KINDS)
        dense = DenseConfig(optimizer="sgd", learning_rate=1.0, clip_norm=clip_norm)
        before, after = step_once(model, dense, make_batch)
        tables.append(whole_tables(model))
    moved = torch.cat([(new - old).flatten() for new, old in zip(after, before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.25, rel=1e-4)
    for name, unclipped in tables[0].items():
        assert torch.equal(tables[1][name], unclipped), name


@pytest.mark.parametrize(
    ("dense", "share"),
    [
        (DenseConfig(optimizer="lamb", learning_rate=0.01), 0.01),
        (DenseConfig(optimizer="lars", learning_rate=2.0, trust_coefficient=0.02), 0.04),
    ],
    ids=["lamb", "lars"],
)
def test_large_batch_optimizers_move_each_layer_by_its_share(dense, share, shard_model, make_batch):
    for old, new in zip(*step_once(shard_model(KINDS), dense, make_batch), strict=True):
        assert ((new - old).norm() / old.norm()).item() == pytest.approx(share, rel=1e-3)


def test_large_batch_optimizers_take_weight_decay(shard_model, make_batch):
    ended = []
    for decay in (0.0, 0.5):
        dense = DenseConfig(optimizer="lars", learning_rate=2.0, weight_decay=decay)
        ended.append(step_once(shard_model(KINDS), dense, make_batch)[1])
    for plain, decayed in zip(*ended, strict=True):
        assert torch.equal(plain, decayed) == (plain.dim() == 1)


def loaded(model, state, dense):
    optimizers = Optimizers(model, dense, TablesConfig(), ScheduleConfig())
    optimizers.load_state_dict(state)
    return optimizers


def state_after_a_step(model, dense, make_batch):
    optimizers = Optimizers(model, dense, TablesConfig(), ScheduleConfig(warmup_steps=4))
    batch = make_batch(16, seed=1)
    optimizers.begin_step(0)
    model(batch.dense, batch.sparse).sum().backward()
    optimizers.step()
    return optimizers.state_dict()


def test_a_resumed_run_has_the_saved_state_and_the_options_of_its_own_configuration(shard_model, make_batch):
    model = shard_model(KINDS)
    old = DenseConfig(optimizer="lars", learning_rate=0.4, weight_decay=0.1, trust_coefficient=0.01)
    state = state_after_a_step(model, old, make_batch)
    new = DenseConfig(optimizer="lars", learning_rate=0.8, weight_decay=0.3, trust_coefficient=0.02)
    optimizers = loaded(model, state, new)
    (group,) = optimizers.dense.param_groups
    assert (group["lr"], group["weight_decay"], group["trust_coefficient"]) == (0.8 * 0.25, 0.3, 0.02)
    for parameter, before in zip(dense_parameters(model), state["dense"]["state"].values(), strict=True):
        now = optimizers.dense.state[parameter]
        assert torch.equal(now["momentum_buffer"], before["momentum_buffer"])


def test_replicated_tables_keep_the_configured_options_when_their_state_is_loaded(shard_model, make_batch):
    model = shard_model(KINDS)
    state = state_after_a_step(model, DenseConfig(), make_batch)
    optimizers = Optimizers(model, DenseConfig(), TablesConfig(eps=0.5), ScheduleConfig())
    (tables,) = optimizers.table_optimizers
    tables.param_groups[0]["eps"] = 1e-8  # as loading the optimizer's own state does
    optimizers.load_state_dict(state)
    assert tables.param_groups[0]["eps"] == 0.5


def test_a_warm_start_continues_the_schedule_also_of_a_warm_started_run(shard_model):
    def made(decay_steps=60):
        schedule = ScheduleConfig(warmup_steps=40, decay_start_step=40, decay_steps=decay_steps)
        return Optimizers(shard_model(KINDS), DenseConfig(), TablesConfig(), schedule)

    first, second, third = made(), made(), made()
    first.begin_step(9)
    second.load_state_dict(first.state_dict())
    assert second.continue_schedule(10) == schedule_factor(second._schedule, 10)
    second.begin_step(5)
    assert second.learning_rates["dense"] == DenseConfig.learning_rate * schedule_factor(second._schedule, 15)
    third.load_state_dict(second.state_dict())
    third.begin_step(6)  # resumed
    assert third.learning_rates["tables"] == TablesConfig.learning_rate * schedule_factor(third._schedule, 16)
    assert third.continue_schedule(20) == schedule_factor(third._schedule, 30)
    with pytest.raises(ValueError, match=r"reached 0 after 110 steps.*schedule.decay_steps to 0"):
        third.continue_schedule(80)


def test_the_state_of_another_optimizer_is_refused(shard_model, make_batch):
    model = shard_model(KINDS)
    state = state_after_a_step(model, DenseConfig(optimizer="adagrad"), make_batch)
    with pytest.raises(ValueError, match=r"optimizer=adagrad, .* resume with dense.optimizer=adagrad"):
        loaded(model, state, DenseConfig(optimizer="adam"))
    del state["optimizer"]  # as in states of older runs
    assert loaded(model, state, DenseConfig()).state_dict()["factor"] == state["factor"]
