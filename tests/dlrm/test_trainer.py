"""The loop: how long it runs, when it evaluates, how it stops, what it says when the loss is no number."""

import os
import signal
from datetime import timedelta

import pytest
import torch
from torch import nn

from data.loader import DataLoader, LoaderConfig
from data.synthetic import SyntheticConfig, generate
from dlrm.config import TrainConfig
from dlrm.evaluation import evaluate
from dlrm.replicas import Replicas
from dlrm.session import NoRecovery
from dlrm.stop import StopRequested, StopSignal
from dlrm.telemetry import NoTelemetry
from dlrm.trainer import NUM_SCALARS, DivergedError, Trainer

ROWS = 1000
BATCH = 96
STEPS = ROWS // BATCH
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer") / "dataset"
    generate(
        SyntheticConfig(scale=1e-4, days=2, rows_per_day=ROWS, rows_per_block=256, rows_per_file=512), folder
    )
    return str(folder)


class Calling(NoRecovery):
    """A session whose verbs a test gives."""

    def __init__(self, **verbs):
        self.__dict__.update(verbs)


class OneLayer(nn.Module):
    """A model that counts what it saw; the labels never depend on it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(13, 1)
        self.batches = 0
        self.poison_at = -1

    def forward(self, dense, sparse):
        self.batches += 1
        logits = self.layer(dense).squeeze(1)
        return logits * float("nan") if self.batches == self.poison_at else logits


class PlainOptimizers:
    learning_rates = {"dense": 0.1}  # noqa: RUF012

    def __init__(self, model):
        self.sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin_step(self, step):
        self.sgd.zero_grad()

    def step(self):
        self.sgd.step()


class Diary(NoTelemetry):
    """What the loop told, in order."""

    def __init__(self):
        self.entries = []

    def step(self, *, step, samples, **_):
        self.entries.append(("step", step, samples))

    def evaluation(self, *, step, samples, values):
        self.entries.append(("evaluation", step, values))

    def steps(self):
        return [entry[1] for entry in self.entries if entry[0] == "step"]

    def evaluations(self):
        return [entry[1] for entry in self.entries if entry[0] == "evaluation"]


@pytest.fixture
def make_trainer(world_of_one, dataset):
    loaders = []

    def work(stop=None, **config):
        torch.manual_seed(0)
        model = OneLayer()
        loader = DataLoader(dataset, LoaderConfig(batch_size=BATCH), days=[0])
        test = DataLoader(dataset, LoaderConfig(batch_size=BATCH, shuffle=False, drop_last=False), days=[1])
        loaders.extend([loader, test])
        return Trainer(
            config=TrainConfig(**config),
            model=model,
            optimizers=PlainOptimizers(model),
            replicas=Replicas(list(model.parameters()), NUM_SCALARS),
            loader=loader,
            evaluate=lambda: evaluate(model, test, CPU),
            telemetry=Diary(),
            session=NoRecovery(),
            stop=stop or StopSignal(),
            device=CPU,
        )

    yield work
    for loader in loaders:
        loader.close()


def test_one_epoch_then_one_evaluation(make_trainer):
    trainer = make_trainer()
    trainer.train()
    assert trainer.telemetry.steps() == list(range(1, STEPS + 1))
    assert trainer.telemetry.evaluations() == [STEPS]
    assert trainer.samples_done == STEPS * BATCH
    assert trainer.telemetry.entries[-2] == ("step", STEPS, STEPS * BATCH)


@pytest.mark.parametrize(
    ("config", "steps", "evaluations"),
    [
        ({"epochs": 3}, 3 * STEPS, [3 * STEPS]),
        ({"max_steps": 4}, 4, [4]),
        ({"max_steps": STEPS}, STEPS, [STEPS]),
        ({"epochs": 2, "max_steps": STEPS + 3}, STEPS + 3, [STEPS + 3]),
        ({"max_steps": 10**6}, STEPS, [STEPS]),
        ({"evaluate_every_steps": 4}, STEPS, [4, 8, STEPS]),
        ({"evaluate_every_steps": STEPS}, STEPS, [STEPS]),  # once, not twice
        ({"max_steps": 6, "evaluate_every_steps": 3}, 6, [3, 6]),
        ({"epochs": 2, "evaluate_every_steps": 8}, 2 * STEPS, [8, 16, 2 * STEPS]),
    ],
)
def test_how_long_and_when_to_evaluate(config, steps, evaluations, make_trainer):
    assert STEPS == 10
    trainer = make_trainer(**config)
    trainer.train()
    assert trainer.telemetry.steps() == list(range(1, steps + 1))
    assert trainer.telemetry.evaluations() == evaluations


def test_every_test_sample_counts_once(make_trainer):
    """1000 is no multiple of the batch: the last batch is padded, and the padding does not count."""
    assert ROWS % BATCH
    trainer = make_trainer(max_steps=1)
    for _ in range(2):
        values = trainer.evaluate()
        assert values.num_samples == ROWS
    assert trainer.model.training


def test_evaluation_changes_nothing(make_trainer):
    trainer = make_trainer()
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.evaluate()
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("poison_at", "place"),
    [
        (4, r"at step 4 \(epoch 0, batch 4 of it, rank 0\)"),
        (STEPS + 3, rf"at step {STEPS + 3} \(epoch 1, batch 3 of it, rank 0\)"),
    ],
)
def test_a_loss_that_is_no_number_names_step_and_batch(poison_at, place, make_trainer):
    trainer = make_trainer(epochs=2)
    trainer.model.poison_at = poison_at
    with pytest.raises(DivergedError, match=f"the loss is nan {place}.*Lower dense.learning_rate"):
        trainer.train()
    assert trainer.telemetry.steps()[-1] == poison_at - 1
    assert trainer.telemetry.evaluations() == []
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_an_absurd_learning_rate_diverges(make_trainer):
    trainer = make_trainer()
    trainer.optimizers.sgd.param_groups[0]["lr"] = 1e38
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step [23] "):
        trainer.train()


def test_a_signal_in_a_step_ends_the_run_after_a_whole_step(make_trainer):
    with StopSignal() as stop:
        trainer = make_trainer(stop, evaluate_every_steps=1000)
        trainer.session = Calling(
            step=lambda: trainer.steps_done == 3 and os.kill(os.getpid(), signal.SIGTERM)
        )
        with pytest.raises(StopRequested, match="SIGTERM"):
            trainer.train()
    # it came after step 3 had asked for wishes, so that the ranks could agree on it in step 4
    assert trainer.telemetry.steps() == [1, 2, 3, 4]
    assert trainer.telemetry.evaluations() == []


def test_no_evaluation_begins_after_a_signal(make_trainer):
    with StopSignal() as stop:
        trainer = make_trainer(stop, evaluate_every_steps=3)
        trainer.session = Calling(
            step=lambda: trainer.steps_done == 3 and os.kill(os.getpid(), signal.SIGINT)
        )
        with pytest.raises(StopRequested, match="SIGINT"):
            trainer.train()
    assert trainer.telemetry.steps() == [1, 2, 3]
    assert trainer.telemetry.evaluations() == []


def test_a_signal_while_evaluating_is_honoured_at_once(make_trainer):
    with StopSignal() as stop:
        trainer = make_trainer(stop, max_steps=1)
        trainer.evaluate = lambda: os.kill(os.getpid(), signal.SIGINT) or pytest.fail("went on")
        with pytest.raises(StopRequested):
            trainer.train()


def test_the_seam_for_recovery(make_trainer):
    """`restore` before the first step, `step` after each with its data position, `finish` at the end."""
    calls = []
    trainer = make_trainer(max_steps=3)
    trainer.session = Calling(
        restore=lambda: calls.append(("restore", trainer.steps_done)),
        step=lambda: calls.append((trainer.steps_done, trainer.loader.state_dict()["phases"][-1]["steps"])),
        finish=lambda: calls.append(("finish", len(trainer.telemetry.evaluations()))),
    )
    trainer.train()
    assert calls == [("restore", 0), (1, 1), (2, 2), (3, 3), ("finish", 1)]


@pytest.mark.parametrize(("signum", "saves"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_stop_lets_the_session_save_but_ctrl_c_does_not_wait(make_trainer, signum, saves):
    left = []
    with StopSignal() as stop:
        trainer = make_trainer(stop)
        trainer.session = Calling(
            step=lambda: trainer.steps_done == 3 and os.kill(os.getpid(), signum),
            leave=lambda spent: left.append((trainer.steps_done, spent < timedelta(minutes=1))),
        )
        with pytest.raises(StopRequested):
            trainer.train()
    assert left == ([(4, True)] if saves else [])


def test_an_evaluation_that_was_due_when_the_run_was_cut_off_comes_first(make_trainer):
    trainer = make_trainer(max_steps=4, evaluate_every_steps=2)
    trainer.session = Calling(restore=lambda: trainer.load_state_dict({"steps_done": 2, "samples_done": 16}))
    trainer.train()
    assert trainer.telemetry.evaluations() == [2, 4]
