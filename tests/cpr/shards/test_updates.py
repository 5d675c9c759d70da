"""The callback runs before any row of its module changes in a step."""

from functools import partial

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

from cpr.shards import before_updates, find_shards, table_groups
from dlrm.sharding.host_lookup import use_host_lookups
from tests.cpr.shards.models import bags, batch, sequences, shard

ROWS = {"a": 10, "b": 7, "c": 12}
LAYOUT = {"a": "tw", "b": "cw", "c": "rw"}
OPTIMIZERS = [
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
]


class Watch:
    """Records at each call which columns of shards have changed since the start of the step."""

    def __init__(self, model, optimizers=()):
        self.shards = find_shards(model, optimizers)
        self.begin()

    def begin(self):
        self.changed_when_called = []
        self._before = self._values()

    def changed(self):
        return {name for name, value in self._values().items() if not torch.equal(value, self._before[name])}

    def __call__(self):
        self.changed_when_called.append(self.changed())

    def assert_in_time(self):
        assert self.changed_when_called, "never called"
        assert self.changed_when_called[0] == set()

    def _values(self):
        return {
            f"{shard.name}/{name}": column.detach().clone()
            for shard in self.shards
            for name, column in shard.columns.items()
        }


def loss_of(model, step, **rows):
    """Loss of the collections only: a sum over all lookups."""
    loss = torch.zeros(())
    for name, tables in rows.items():
        found = model.module.get_submodule(name)(batch(step, 4, **tables))
        values = [each.values() for each in found.values()] if name == "sequences" else [found.values()]
        loss = loss + sum(value.square().sum() for value in values)
    return loss


@pytest.fixture(params=["fbgemm", "host lookups"])
def lookups(request):
    """Replaces the lookups of a model by the trainer's own, or leaves them."""

    def put(model):
        if request.param == "host lookups":
            tables = [group.emb_module for group in table_groups(model)]
            assert use_host_lookups(tables, torch.float32) == len(tables)
        return model

    return put


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_callback_runs_in_each_step_before_any_row_changes(world_of_one, optimizer):
    model = shard(LAYOUT, optimizer, bags=bags(**ROWS), sequences=sequences(a=9, b=5))
    watch = Watch(model)
    with before_updates(model, [], watch):
        for step in range(3):
            watch.begin()
            loss_of(model, step, bags=ROWS, sequences={"a": 9, "b": 5}).backward()
            watch.assert_in_time()
            changed = {name.partition("/")[0] for name in watch.changed()}
            assert len(changed) == 5, "every table was updated"


def test_callback_runs_before_the_rows_of_each_module_change(world_of_one):
    model = shard({"a": "tw"}, left=bags(a=6), right=bags(a=6))
    calls = Watch(model)
    with before_updates(model, [], calls):
        loss_of(model, 0, left={"a": 6}, right={"a": 6}).backward()
    modules = [{name.partition(".")[0] for name in changed} for changed in calls.changed_when_called]
    assert modules in ([set(), {"left"}], [set(), {"right"}])


def test_callback_runs_only_with_a_backward_pass(world_of_one, lookups):
    model = lookups(shard({"a": "tw", "b": "rw"}, bags=bags(a=10, b=7)))
    watch = Watch(model)
    with before_updates(model, [], watch):
        with torch.no_grad():
            loss_of(model, 0, bags={"a": 10, "b": 7})
        model.eval()
        loss_of(model, 0, bags={"a": 10, "b": 7})
        assert watch.changed_when_called == []
        model.train()
        loss_of(model, 0, bags={"a": 10, "b": 7}).backward()
    watch.assert_in_time()
    assert watch.changed()


@pytest.mark.parametrize("moment", ["before the step", "between forward and backward"])
def test_removed_hooks_do_not_call(world_of_one, moment):
    model = shard({"a": "tw"}, bags=bags(a=10))
    watch = Watch(model)
    hooks = before_updates(model, [], watch)
    if moment == "before the step":
        hooks.remove()
    loss = loss_of(model, 0, bags={"a": 10})
    hooks.remove()
    loss.backward()
    assert watch.changed_when_called == []
    assert watch.changed()
    assert not any(group.emb_module._forward_hooks for group in table_groups(model))


def test_exception_of_the_callback_prevents_the_change(world_of_one, lookups):
    def refuse():
        raise RuntimeError("not now")

    model = lookups(shard({"a": "tw"}, bags=bags(a=10)))
    watch = Watch(model)
    with before_updates(model, [], refuse), pytest.raises(RuntimeError, match="not now"):
        loss_of(model, 0, bags={"a": 10}).backward()
    assert watch.changed() == set()


def plain(parameters):
    return torch.optim.Adagrad(list(parameters.values()), lr=0.1)


def keyed(parameters):
    return KeyedOptimizerWrapper(parameters, lambda values: RowWiseAdagrad(values, lr=0.1))


@pytest.mark.parametrize(
    "make",
    [
        plain,
        keyed,
        lambda parameters: CombinedOptimizer([("tables", keyed(parameters))]),
        lambda parameters: GradientClippingOptimizer(keyed(parameters)),
    ],
    ids=["plain", "keyed", "combined", "clipping"],
)
def test_tables_of_an_ordinary_optimizer(world_of_one, make):
    model = shard({"a": "dp", "b": "unfused"}, bags=bags(a=10, b=7))
    tables = {name: value for name, value in model.named_parameters() if "embedding_bags" in name}
    optimizer = make(tables)
    dense = torch.optim.SGD(model.module.dense.parameters(), lr=0.1)
    watch = Watch(model)
    with before_updates(model, [dense, optimizer], watch):
        for step in range(2):
            watch.begin()
            loss_of(model, step, bags={"a": 10, "b": 7}).backward()
            dense.step()
            assert watch.changed_when_called == [], "nothing was about to change"
            optimizer.step()
            assert watch.changed_when_called == [set()]
            assert len(watch.changed()) == 2
    watch.begin()
    optimizer.step()
    assert watch.changed_when_called == []


def test_averages_of_the_forward_pass(world_of_one):
    model = shard({"a": "tw"}, EmbOptimType.EXACT_SGD, bags=bags(a=10))
    (group,) = table_groups(model)
    watch = Watch(model)
    group.emb_module.optimizer = EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD
    with before_updates(model, [], watch):
        group.emb_module.optimizer = EmbOptimType.EXACT_SGD
        loss_of(model, 0, bags={"a": 10})
        assert watch.changed_when_called == [set()]
        model.eval()
        loss_of(model, 0, bags={"a": 10})
        assert watch.changed_when_called == [set()], "evaluation takes no averages"


class Batch(Pipelineable):
    """A batch for TorchRec's pipeline."""

    def __init__(self, step):
        self._features = batch(step, 4, a=10, b=7)

    def __getitem__(self, name):
        return self._features

    def to(self, device, non_blocking=False):
        return self

    def record_stream(self, stream):
        """Nothing to do on the CPU."""


def pipelined():
    """A model in TorchRec's training pipeline, and a function that trains its next step, of five."""
    model = shard({"a": "tw", "b": "rw"}, bags=bags(a=10, b=7))
    dense = torch.optim.SGD(model.module.dense.parameters(), lr=0.1)
    pipeline = TrainPipelineSparseDist(
        model,
        dense,
        torch.device("cpu"),
        custom_model_fwd=lambda features: (model(features).exp().sum(), torch.zeros(())),
    )
    batches = iter([Batch(step) for step in range(5)])
    return model, partial(pipeline.progress, batches)


def test_updates_in_a_training_pipeline(world_of_one):
    model, progress = pipelined()
    watch = Watch(model)
    with before_updates(model, [], watch):
        for _ in range(5):
            watch.begin()
            progress()
            assert watch.changed_when_called[0] == set()
            assert len(watch.changed()) == 4
