"""The training loop: steps, evaluations, signals, NaN."""

import os
import signal
import time
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from data.loader import DataLoader, LoaderConfig
from data.synthetic import SyntheticConfig
from dlrm.comm.late import LateScalars
from dlrm.config.schema import TrainConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.fault_tolerance.session import Session
from dlrm.launch.stop_signal import StopRequested, StopSignal
from dlrm.pipeline.schedules import Plain
from dlrm.telemetry import Recorder
from dlrm.training.evaluation import evaluate
from dlrm.training.trainer import NUM_SCALARS, DivergedError, Trainer
from tests.datasets import generate_few

ROWS = 1000
BATCH = 96
STEPS = ROWS // BATCH
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer") / "dataset"
    generate_few(
        SyntheticConfig(scale=1e-4, days=2, rows_per_day=ROWS, rows_per_block=256, rows_per_file=512), folder
    )
    return str(folder)


class Calling(Session):
    """A session whose methods and values a test gives."""

    batches_to_skip = 0
    leaving_takes = timedelta(0)

    def __init__(self, **given):
        self.__dict__.update(given)


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


class CallLog(Recorder):
    """Records the calls of the training loop, in order."""

    def __init__(self):
        super().__init__()
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
            schedule=Plain(model),
            optimizers=PlainOptimizers(model),
            replicas=AllReduceSync(list(model.parameters()), NUM_SCALARS),
            loader=loader,
            evaluate=partial(evaluate, model, test, CPU),
            telemetry=CallLog(),
            session=Session(),
            stop=stop or StopSignal(),
            device=CPU,
        )

    yield work
    for loader in loaders:
        loader.close()


def test_batches_to_skip_are_dropped(make_trainer):
    trainer = make_trainer(epochs=1)
    session = Calling(batches_to_skip=2)
    session.note_skipped = lambda: setattr(session, "batches_to_skip", session.batches_to_skip - 1)
    trainer.session = session
    trainer.train()
    assert session.batches_to_skip == 0
    assert trainer.model.training
    assert trainer.steps_done == STEPS - 2
    assert trainer.telemetry.steps() == list(range(1, STEPS - 1))
    assert trainer.loader.epoch == 1


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
        ({"epochs": 3, "evaluate_every_epochs": 1}, 3 * STEPS, [STEPS, 2 * STEPS, 3 * STEPS]),
        ({"epochs": 5, "evaluate_every_epochs": 2}, 5 * STEPS, [2 * STEPS, 4 * STEPS, 5 * STEPS]),
        (
            {
                "epochs": 3,
                "evaluate_every_epochs": 2,
                "evaluate_every_steps": STEPS,
                "max_steps": 2 * STEPS + 1,
            },
            2 * STEPS + 1,
            [STEPS, 2 * STEPS, 2 * STEPS + 1],
        ),
    ],
)
def test_how_long_and_when_to_evaluate(config, steps, evaluations, make_trainer):
    assert STEPS == 10
    trainer = make_trainer(**config)
    trainer.train()
    assert trainer.telemetry.steps() == list(range(1, steps + 1))
    assert trainer.telemetry.evaluations() == evaluations
    assert trainer.samples_done == steps * BATCH


def test_the_logged_loss_is_that_of_all_ranks(make_trainer):
    trainer, logged = make_trainer(max_steps=3), []
    average, step = trainer.replicas.average, trainer.telemetry.step

    def of_two_ranks(scalars):
        means = average(scalars)
        return torch.cat([means[:1] + 1.0, means[1:]])  # the other rank's loss is larger by 2

    trainer.replicas.average = of_two_ranks
    trainer.telemetry.step = lambda *, loss, **more: (logged.append(float(loss)), step(loss=loss, **more))
    own = []
    trainer.schedule.step = lambda *given, inner=trainer.schedule.step: own.append(inner(*given)) or own[-1]
    trainer.train()
    assert logged == pytest.approx([float(loss.detach()) + 1.0 for loss, _ in own])


@pytest.mark.parametrize("every", [4, 5])
def test_windows_of_progressive_validation_hold_each_sample_once(make_trainer, every):
    trainer, seen = make_trainer(progressive_steps=every), []
    trainer.telemetry.progressive = lambda step, samples, values: seen.append((step, values.num_samples))
    trainer.train()
    ends = [*range(every, STEPS, every), STEPS]
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert seen == [(end, length * BATCH) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("is_in_next_epoch", [False, True])
def test_an_epoch_whose_evaluation_was_cut_off_is_evaluated_first(make_trainer, is_in_next_epoch):
    """Saves before the evaluation lie at the end of the epoch, saves during it at the start of the next."""
    trainer = make_trainer(epochs=2, evaluate_every_epochs=1)
    for _ in trainer.loader:
        if trainer.loader.steps_left == 0 and not is_in_next_epoch:
            break
    trainer.steps_done = STEPS
    trainer.train()
    assert [entry[:2] for entry in trainer.telemetry.entries][:2] == [
        ("evaluation", STEPS),
        ("step", STEPS + 1),
    ]
    assert trainer.telemetry.evaluations() == [STEPS, 2 * STEPS]


def test_every_test_sample_counts_once(make_trainer):
    """1000 is no multiple of the batch: the last batch is padded, and the padding does not count."""
    assert ROWS % BATCH
    trainer = make_trainer(max_steps=1)
    for _ in range(2):
        values = trainer.evaluate()
        assert values.num_samples == ROWS
    assert trainer.model.training


@pytest.mark.parametrize(
    ("poison_at", "place"),
    [
        (4, r"at step 4 \(epoch 0, batch 4 of it, rank 0\)"),
        (STEPS + 3, rf"at step {STEPS + 3} \(epoch 1, batch 3 of it, rank 0\)"),
    ],
)
def test_a_nan_loss_is_reported_with_step_and_batch(poison_at, place, make_trainer):
    trainer = make_trainer(epochs=2)
    trainer.model.poison_at = poison_at
    with pytest.raises(DivergedError, match=f"the loss is nan {place}.*Lower dense.learning_rate"):
        trainer.train()
    assert trainer.telemetry.steps()[-1] == poison_at - 1
    assert trainer.telemetry.evaluations() == []
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_a_nan_gradient_ends_the_run_in_its_step(make_trainer):
    """As when NaN in a table's row meets a fused ReLU, which makes 0 of it."""
    trainer = make_trainer(log_every_steps=1000)
    weight = trainer.model.layer.weight
    weight.register_hook(lambda grad: grad * torch.nan if trainer.model.batches == 4 else grad)
    place = r"at step 4 \(epoch 0, batch 4 of it, rank 0\)"
    with pytest.raises(DivergedError, match=f"gradients .* NaN or infinite {place}.*Lower dense"):
        trainer.train()
    assert trainer.telemetry.steps() == [1, 2, 3]
    assert weight.isfinite().all()


def test_the_reported_batch_counts_those_before_a_resume(make_trainer):
    trainer = make_trainer()
    before = asdict(trainer.loader._shape) | {"world_size": 2, "batch_size": BATCH // 2, "steps": 3}
    trainer.loader.load_state_dict(trainer.loader.state_dict() | {"phases": [before]})
    trainer.model.poison_at = 2
    with pytest.raises(DivergedError, match=r"at step 2 \(epoch 0, batch 5 of it, rank 0\)"):
        trainer.train()


def spoil_in_step_2(trainer):
    """Lets a parameter that no loss depends on become no number."""
    trainer.model.unread = unread = torch.nn.Linear(1, 1)
    step = trainer.optimizers.step

    def spoil():
        step()
        if trainer.steps_done == 1:
            unread.bias.data.fill_(torch.nan)

    trainer.optimizers.step = spoil


@pytest.mark.parametrize(("log_every_steps", "found_at"), [(4, 3), (100, STEPS)])
def test_a_nan_parameter_ends_the_run(log_every_steps, found_at, make_trainer):
    """In steps that are logged; before evaluations and saves in any case."""
    trainer = make_trainer(log_every_steps=log_every_steps)
    spoil_in_step_2(trainer)
    with pytest.raises(DivergedError, match=rf"unread.bias .* after step {found_at}, .*Lower dense"):
        trainer.train()
    assert trainer.telemetry.evaluations() == []


def test_a_nan_parameter_is_found_a_step_later_without_gradients(make_trainer):
    trainer = make_trainer(log_every_steps=100)
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    spoil_in_step_2(trainer)
    with pytest.raises(DivergedError, match=r"unread.bias .* after step 2, .*Lower dense"):
        trainer.train()


def test_no_evaluation_begins_after_a_signal(make_trainer):
    with StopSignal() as stop:
        trainer = make_trainer(stop, evaluate_every_steps=3)
        trainer.session = Calling(
            step=lambda _: trainer.steps_done == 3 and os.kill(os.getpid(), signal.SIGINT)
        )
        with pytest.raises(StopRequested, match="SIGINT"):
            trainer.train()
    assert trainer.telemetry.steps() == [1, 2, 3]
    assert trainer.telemetry.evaluations() == []


class Ringing:
    """A loader in which a signal comes while it fetches batch `at` of its first epoch."""

    def __init__(self, loader, at, signum, then=lambda: None):
        self.loader, self.at, self.signum, self.then = loader, at, signum, then
        self.fetched = 0

    def __iter__(self):
        for batch in self.loader:
            if self.fetched == self.at:
                os.kill(os.getpid(), self.signum)
                self.then()
            self.fetched += 1
            yield batch

    def __getattr__(self, name):
        return getattr(self.loader, name)


def saving(trainer):
    """Lets the trainer's session note after which steps it could save before it left."""
    saved = []
    trainer.session = Calling(leave=lambda spent: saved.append(trainer.steps_done))
    return saved


@pytest.mark.parametrize(("signum", "saves"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_while_a_batch_is_fetched_ends_the_run_after_its_step(make_trainer, signum, saves):
    with StopSignal() as stop:
        trainer = make_trainer(stop)
        trainer.loader = Ringing(trainer.loader, at=3, signum=signum)
        saved = saving(trainer)
        with pytest.raises(StopRequested, match=signum.name):
            trainer.train()
    assert trainer.telemetry.steps() == [1, 2, 3, 4]
    assert saved == ([4] if saves else [])


def test_a_loader_that_hangs_is_left_without_a_save(make_trainer):
    with StopSignal(grace=timedelta(seconds=0.2)) as stop:
        trainer = make_trainer(stop)
        trainer.loader = Ringing(trainer.loader, at=3, signum=signal.SIGTERM, then=lambda: time.sleep(30))
        saved = saving(trainer)
        with pytest.raises(StopRequested):
            trainer.train()
    assert trainer.telemetry.steps() == [1, 2, 3]
    assert saved == []


@pytest.mark.parametrize(("signum", "saves"), [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_while_evaluating_ends_it_before_its_next_batch(make_trainer, signum, saves):
    with StopSignal() as stop:
        trainer = make_trainer(stop, max_steps=2)
        batches = []

        def ring_in_the_third(model, inputs, logits):
            batches.append(model.training)
            if len(batches) == 5:
                os.kill(os.getpid(), signum)

        trainer.model.register_forward_hook(ring_in_the_third)
        saved = saving(trainer)
        with pytest.raises(StopRequested, match=signum.name):
            trainer.train()
    assert batches == [True, True, False, False, False]
    assert trainer.telemetry.evaluations() == []
    assert saved == ([2] if saves else [])


@pytest.mark.parametrize(("poison_at", "trained"), [(2, 3), (4, 4)])
def test_on_a_gpu_nan_ends_the_run_a_step_later_and_before_its_end_is_saved(
    make_trainer, monkeypatch, poison_at, trained
):
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    trainer = make_trainer(max_steps=4)
    trainer.__dict__["_scalars"] = LateScalars(on_gpu=True)
    trainer.model.poison_at, saved = poison_at, saving(trainer)
    with pytest.raises(
        DivergedError, match=rf"the loss is nan at step {poison_at} \(epoch 0, batch {poison_at} of it"
    ):
        trainer.train()
    assert trainer.model.batches == trained
    assert not saved


@pytest.mark.parametrize(("at_once", "saves"), [(False, True), (True, False)])
def test_a_signal_of_another_rank_ends_the_evaluation_here_too(make_trainer, monkeypatch, at_once, saves):
    """The ranks agree on it before each batch, by the larger of what they were asked."""
    trainer = make_trainer(max_steps=1)
    saved, asked = saving(trainer), []

    def with_the_other_rank(wishes, op):
        assert op == dist.ReduceOp.MAX
        assert wishes.tolist() == [0, 0]
        asked.append(trainer.telemetry.steps())
        theirs = [len(asked) == 4, len(asked) == 4 and at_once]
        wishes.copy_(torch.maximum(wishes, torch.tensor(theirs)))

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", with_the_other_rank)
    with pytest.raises(StopRequested):
        trainer.train()
    assert asked == [[1]] * 4, "before it begins, and before three batches"
    assert trainer.model.batches == 1 + 2
    assert saved == ([1] if saves else [])


def test_sigterm_while_training_waits_for_the_save_before_is_answered_with_a_save(make_trainer):
    """The wait takes longer than the grace of a step."""
    with StopSignal(grace=timedelta(seconds=0.1)) as stop:
        trainer = make_trainer(stop)
        saved = saving(trainer)

        def wait(_):
            if trainer.steps_done == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)

        trainer.session.step, trainer.session.leaving_takes = wait, timedelta(seconds=30)
        with pytest.raises(StopRequested):
            trainer.train()
    assert trainer.telemetry.steps() == [1, 2, 3]
    assert saved == [3]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_lets_the_final_save_complete_and_ctrl_c_does_not(make_trainer, signum):
    finished = []
    with StopSignal() as stop:
        trainer = make_trainer(stop, max_steps=1)
        trainer.session = Calling(
            leaving_takes=timedelta(seconds=30),
            finish=lambda: os.kill(os.getpid(), signum) or finished.append(trainer.steps_done),
        )
        if signum == signal.SIGINT:
            with pytest.raises(StopRequested):
                trainer.train()
        else:
            trainer.train()
    assert finished == ([1] if signum == signal.SIGTERM else [])


def test_the_session_methods_are_called_in_order(make_trainer):
    """`restore` before the first step, `step` after each with its data position, `finish` at the end.

    Nothing is recorded before the run is known to go on; the end is saved before it is evaluated.
    """
    calls = []
    trainer = make_trainer(max_steps=3)
    trainer.telemetry.begin = lambda: calls.append("begin")
    trainer.replicas.join = lambda: calls.append("join")
    trainer.session = Calling(
        restore=lambda: calls.append(("restore", trainer.steps_done)),
        step=lambda samples: calls.append(
            (trainer.steps_done, trainer.loader.state_dict()["phases"][-1]["steps"], samples)
        ),
        save_end=lambda: calls.append(("save_end", len(trainer.telemetry.evaluations()))),
        finish=lambda: calls.append(("finish", len(trainer.telemetry.evaluations()))),
    )
    trainer.train()
    steps = [(1, 1, BATCH), (2, 2, BATCH), (3, 3, BATCH)]
    assert calls == [("restore", 0), "begin", *steps, "join", ("save_end", 0), "join", ("finish", 1)]


@pytest.mark.parametrize("config", [{}, {"max_steps": 4}, {"evaluate_every_steps": 5}])
def test_the_end_is_saved_before_a_failing_evaluation(make_trainer, config):
    trainer = make_trainer(**config)
    saved, evaluate = [], trainer.evaluate

    def evaluate_on_damaged_data(before_batch):
        if trainer.steps_done == config.get("max_steps", STEPS):
            raise OSError("the test day is gone")
        return evaluate(before_batch)

    trainer.evaluate = evaluate_on_damaged_data
    trainer.session = Calling(save_end=lambda: saved.append(trainer.steps_done))
    with pytest.raises(OSError, match="the test day is gone"):
        trainer.train()
    assert saved == [config.get("max_steps", STEPS)]


@pytest.mark.parametrize("max_steps", [3, 4])
def test_a_run_that_is_beyond_its_last_step_is_refused_and_one_at_it_is_only_evaluated(
    make_trainer, max_steps, caplog
):
    trainer = make_trainer(max_steps=max_steps)
    trainer.session = Calling(restore=lambda: trainer.load_state_dict({"steps_done": 4, "samples_done": 32}))
    if max_steps < 4:
        with pytest.raises(ValueError, match=r"train\.max_steps is 3, but the run has done 4 steps"):
            trainer.train()
        return
    with caplog.at_level("INFO", "dlrm"):
        trainer.train()
    assert trainer.telemetry.evaluations() == [4]
    assert "the run has done all its 4 steps" in caplog.text


def test_an_evaluation_due_at_the_resumed_step_comes_first(make_trainer):
    trainer = make_trainer(max_steps=4, evaluate_every_steps=2)
    trainer.session = Calling(restore=lambda: trainer.load_state_dict({"steps_done": 2, "samples_done": 16}))
    trainer.train()
    assert trainer.telemetry.evaluations() == [2, 4]
