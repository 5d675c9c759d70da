"""README's loop with TorchRec's own optimizers: training resumes bit for bit."""

import numpy as np
import pytest
import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from cpr.errors import MismatchError

pytestmark = pytest.mark.usefixtures("world_of_one")

STAGES = [WarmupStage(WarmupPolicy.LINEAR, max_iters=5, value=0.1)]


def adam(model):
    return KeyedOptimizerWrapper(
        dict(model.module.dense.named_parameters()), lambda parameters: torch.optim.Adam(parameters, lr=0.1)
    )


def partly_unused(model):
    """One of its parameters never gets a gradient, so never state."""
    parameters = {**dict(model.module.dense.named_parameters()), "unused": torch.nn.Parameter(torch.ones(3))}
    return KeyedOptimizerWrapper(parameters, lambda parameters: torch.optim.Adam(parameters, lr=0.1))


OPTIMIZERS = {
    "plain": lambda model: torch.optim.Adam(model.module.dense.parameters(), lr=0.1),
    "keyed": adam,
    "unused": partly_unused,
    "clipping": lambda model: GradientClippingOptimizer(adam(model), max_gradient=0.5),
    "warm-up": lambda model: WarmupOptimizer(adam(model), STAGES, lr=0.1),
    "combined": lambda model: CombinedOptimizer([model.fused_optimizer, adam(model)]),
    "named": lambda model: CombinedOptimizer([("tables", model.fused_optimizer), ("dense", adam(model))]),
    "fused": lambda model: model.fused_optimizer,
}


def values_of(run):
    """All that a checkpoint restores, by path."""
    state = run.checkpointer.state
    found = {}
    put(found, "", {"common": state.common(run.checkpointer.steps_done), "own": state.own()})
    for shard in run.checkpointer.shards:
        put(found, shard.name, shard.columns)
    return found


def put(found, path, tree):
    """All values of a tree, by path."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            put(found, f"{path}/{key}", value)
    elif isinstance(tree, list | tuple):
        put(found, path, dict(enumerate(tree)))
    else:
        found[path] = torch.as_tensor(tree).clone() if isinstance(tree, int | float | torch.Tensor) else tree


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        is_equal = torch.equal if isinstance(value, torch.Tensor) else np.array_equal
        assert is_equal(value, theirs[name]), name


@pytest.fixture
def loop(start):
    """Starts runs with an optimizer on one directory, one at a time."""
    return lambda make: start(make_optimizer=make)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_training_resumes_bit_for_bit_with_each_optimizer(loop, name, trained):
    """Also where the model that loads has trained, or what was saved has not."""
    run = loop(OPTIMIZERS[name])
    run.save(3)
    saved = values_of(run)
    run.train(3)
    expected = values_of(run)
    run.checkpointer.close()
    again = loop(OPTIMIZERS[name])
    again.train(trained)
    assert again.checkpointer.load().state.step == 3
    same(values_of(again), saved)
    again.train(3)
    same(values_of(again), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_from_before_the_first_step_resets_a_trained_model(loop, name):
    run = loop(OPTIMIZERS[name])
    run.save()
    saved = values_of(run)
    run.train(2)
    trained = values_of(run)
    run.checkpointer.load()
    if name != "warm-up":  # which sets its rate when it steps
        same(values_of(run), saved)
    run.train(2)
    same(values_of(run), trained)


def other_optimizer(model):
    return KeyedOptimizerWrapper(
        dict(model.module.dense.named_parameters()),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    )


@pytest.mark.parametrize("trained", [0, 2], ids=["fresh", "trained"])
def test_a_load_that_an_optimizer_refuses_changes_nothing(loop, trained):
    run = loop(OPTIMIZERS["combined"])
    run.train(3)
    run.checkpointer.save("consistent")
    run.checkpointer.close()
    other = loop(other_optimizer)
    other.train(trained)
    before = values_of(other)
    with pytest.raises(MismatchError, match=r"'optimizer' refuses what was saved .*Different state"):
        other.checkpointer.load()
    same(values_of(other), before)
    assert other.checkpointer.steps_done == trained


def test_a_load_of_other_tables_changes_nothing(loop):
    run = loop(adam)
    run.train(3)
    run.checkpointer.save("consistent")
    run.checkpointer.close()
    other = loop(adam)
    other.train(1)
    shard = other.checkpointer.shards[0]
    object.__setattr__(shard, "optimizer_state", {})
    before = values_of(other)
    with pytest.raises(MismatchError, match="its columns in this model"):
        other.checkpointer.load()
    same(values_of(other), before)


class Refusing:
    """Takes what is saved of it once."""

    def __init__(self):
        self.value, self.loads = 7, 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        self.loads += 1
        if self.loads > 1:
            raise OSError("its file is gone")


def test_a_load_that_cannot_be_undone_says_so(loop):
    run = loop(adam)
    run.checkpointer.register("loader", Refusing())
    run.checkpointer.register("ranked", Refusing(), per_rank=True)
    run.save(1)
    run.checkpointer.load()
    with pytest.raises(Exception, match=r"'loader' refuses.*its file is gone.*could not be put back"):
        run.checkpointer.load()


def test_a_wrapper_around_a_fused_optimizer_is_refused_with_what_to_pass(loop):
    def make(model):
        return GradientClippingOptimizer(CombinedOptimizer([model.fused_optimizer, adam(model)]))

    with pytest.raises(ValueError, match=r"GradientClippingOptimizer is around a fused .*dense"):
        loop(make)
