"""What evaluations decide: the best state, and when training stops early."""

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.checkpoint import checkpointer as checkpoints
from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.checkpoint.storage.local import LocalStorage
from cpr.faults.kinds import StorageDelay
from cpr.faults.storages import FaultyStorage
from dlrm.config.goal import BUILT_IN, Goal
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.launch.stop_signal import StopRequested, StopSignal
from dlrm.metrics import MetricValues, SampleMean
from dlrm.training.best import Patience
from dlrm.training.build import build
from dlrm.training.data import prepare

ALONE = Ranks(rank=0, local_rank=0, world_size=1)
AUC = Goal.parse("auc")
VALUES = st.lists(st.none() | st.sampled_from([0.5, 0.6, 0.7, 0.71, 0.72, 0.8]), max_size=12)


@pytest.mark.parametrize("name", [*BUILT_IN, "max:recall@10", "min:rmse"])
def test_a_better_value_lies_on_the_right_side_by_more_than_the_margin(name):
    goal = Goal.parse(name)
    assert goal.text == name
    good, bad = (0.8, 0.7) if goal.label in {"AUC", "recall@10"} else (0.7, 0.8)
    assert goal.is_better(good, bad)
    assert not goal.is_better(bad, good)
    assert not goal.is_better(good, good)
    assert not goal.is_better(good, bad, by=0.2)
    for value, expected in ((good, good), (None, None), (math.nan, None)):
        mean = {goal.name: SampleMean(value=value, num_samples=1)}
        metric = {"means": mean, "log_loss": 0.5} if goal.is_own else {name: value}
        assert goal.value_in(MetricValues(num_samples=1, **metric)) == expected


@pytest.mark.parametrize(
    ("name", "values", "choices"),
    [
        ("auc", {"means": {"rmse": SampleMean(value=0.1, num_samples=1)}}, "max:rmse or min:rmse"),
        ("max:recall", {"log_loss": 0.5}, "auc, log_loss, normalized_entropy"),
    ],
)
def test_a_metric_that_the_model_does_not_give_is_refused(name, values, choices):
    with pytest.raises(ValueError, match=rf"train.keep_best is {name}, which .* choose one of {choices}$"):
        Goal.parse(name).value_in(MetricValues(num_samples=1, **values))


def waited_after(values: Sequence[float | None], margin: float) -> int:
    """Evaluations since the last improvement, from the whole sequence."""
    reference, waited = None, 0
    for value in values:
        improved = value is not None and (reference is None or value > reference + margin)
        reference, waited = (value, 0) if improved else (reference, waited + 1)
    return waited


@given(
    values=VALUES, limit=st.integers(0, 3), margin=st.sampled_from([0.0, 0.015, 0.15]), cut=st.integers(0, 12)
)
def test_patience_ends_after_so_many_evaluations_and_survives_a_restart_anywhere(values, limit, margin, cut):
    patience = Patience(AUC, limit, margin)
    for number, value in enumerate(values):
        if number == cut:  # an evaluation that is repeated after the restart counts once
            state, patience = patience.state_dict(), Patience(AUC, limit, margin)
            patience.load_state_dict(state)
            if number:
                patience.observe(number, values[number - 1])
        patience.observe(number + 1, value)
        assert patience.waited == waited_after(values[: number + 1], margin)
        assert patience.is_over == (0 < limit <= patience.waited)
    other = Patience(Goal.parse("log_loss"), limit, margin)
    other.load_state_dict(patience.state_dict())
    assert other.waited == 0


def evaluation(auc: float | None) -> MetricValues:
    log_loss = None if auc is None else 1 - auc
    return MetricValues(num_samples=1, auc=auc, log_loss=log_loss, note="none was given")


@pytest.fixture
def train(world_of_one, small_dataset, tmp_path):
    """Trains ten steps, with an evaluation every second, whose AUCs a test gives; returns the trainer."""

    def work(aucs, *overrides, resume=None, before=lambda trainer: None):
        settings = (f"data.uri={small_dataset}", "data.global_batch_size=32", "train.max_steps=10")
        every = (
            "train.evaluate_every_steps=2",
            "train.keep_best=auc",
            f"train.run_folder={tmp_path / 'runs'}",
        )
        inputs = prepare(load_config("tiny", [*settings, *every, *overrides]), "tiny", ALONE, resume)
        given = iter(aucs)
        with StopSignal() as stop, closing(inputs):
            trainer = build(inputs, stop)
            trainer.evaluate = lambda _: evaluation(next(given))
            before(trainer)
            with closing(trainer.replicas), closing(trainer.session), closing(trainer.telemetry):
                trainer.train()
        assert list(given) == []
        return trainer

    return work


def kept_steps(uri: str | Path) -> list[int]:
    """Steps of the states in a directory, the best one first."""
    return [state.step for state in find_states(LocalStorage(str(uri)))[0]]


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_the_best_state_is_kept_and_the_one_before(train, tmp_path):
    rows, weights = [], []

    def keep_copies(trainer):
        judge = trainer.selection.judge

        def judge_and_copy(*arguments, **more):
            judge(*arguments, **more)
            weights.append([each.detach().clone() for each in trainer._dense.values()])
            rows.append([shard.weights.clone() for shard in shards_of(trainer)])

        trainer.selection.judge = judge_and_copy

    def shards_of(trainer):
        with Checkpointer(trainer.model, CheckpointConfig(uri=str(tmp_path / "unused"))) as found:
            return found.shards

    trainer = train([0.6, None, 0.5, 0.7, 0.7], before=keep_copies)
    best = only(tmp_path / "runs") / "best"
    assert kept_steps(best) == [8, 2]
    report = trainer.selection.report
    assert (report.metric, report.value, report.step, report.uri) == ("AUC", 0.7, 8, str(best))
    assert report.stopped_early == ""

    for parameter in trainer._dense.values():
        parameter.data.zero_()
    with Checkpointer(trainer.model, CheckpointConfig(uri=str(best))) as checkpointer:
        checkpointer.warm_start(str(best), [])
        loaded = [shard.weights.clone() for shard in checkpointer.shards]
    assert all(map(torch.equal, trainer._dense.values(), weights[3]))
    assert all(map(torch.equal, loaded, rows[3]))
    assert not all(map(torch.equal, loaded, rows[4]))


def test_training_stops_early_and_a_resumed_run_says_so(train, tmp_path, caplog):
    save = "checkpoint.every_steps=4"
    patience = ("train.patience=2", "train.min_improvement=0.01", save)
    trainer = train([0.6, 0.7, 0.705, 0.6], *patience)
    assert trainer.steps_done == 8
    assert trainer.selection.report.stopped_early == "no better AUC in 2 evaluations"
    folder = only(tmp_path / "runs")
    assert kept_steps(folder / "best") == [6, 4]  # better is better, be it by less than what is waited for
    assert kept_steps(folder / "checkpoint")[0] == 8

    caplog.clear()
    with caplog.at_level("INFO", "dlrm"):
        assert train([0.6], *patience, resume=folder).steps_done == 8  # of the save before that evaluation
    assert "training stops early, after step 8: no better AUC in 2 evaluations" in caplog.text
    trainer = train([0.6, 0.8], "train.patience=3", save, resume=folder)
    assert trainer.steps_done == 10
    assert kept_steps(folder / "best") == [10, 6]


def test_a_run_that_ends_anyway_has_not_stopped_early(train):
    assert train([0.6, 0.7, 0.7, 0.7, 0.7], "train.patience=3").selection.report.stopped_early == ""


def test_a_run_that_was_saved_after_it_stopped_early_is_only_evaluated(train, tmp_path, caplog):
    options = ("train.patience=1", "checkpoint.every_steps=100")
    train([0.7, 0.6], *options)
    folder = only(tmp_path / "runs")
    with caplog.at_level("INFO", "dlrm"):
        assert train([0.6], *options, resume=folder).steps_done == 4
    assert (
        "the run stopped early at step 4 (no better AUC in 1 evaluation), and is only evaluated"
        in caplog.text
    )


def test_a_run_that_goes_back_keeps_the_best_of_its_lost_future(train, tmp_path):
    """As after a failure whose newest save was damaged: the state is sound, and better than what follows."""
    train([0.6, 0.7, 0.5, 0.8, 0.5], "checkpoint.every_steps=4", "checkpoint.keep_last=3")
    folder = only(tmp_path / "runs")
    for state in find_states(LocalStorage(str(folder / "checkpoint")))[0][:2]:
        (folder / "checkpoint" / state.newest.path).write_text("damaged")
    trainer = train([0.65, 0.75, 0.75, 0.8], "checkpoint.every_steps=4", resume=folder)  # from step 4
    assert kept_steps(folder / "best") == [8, 4]
    assert trainer.selection.report.value == 0.8


@pytest.fixture
def opened(monkeypatch):
    """Storages of best states, in the order in which they were opened: the first at the start of a run.

    Under a number, a test can give a function that is called with the storage when it is opened.
    """
    storages, when = [], {}
    open_storage = checkpoints.open_storage

    def open_faulty(uri):
        if not uri.endswith("/best"):
            return open_storage(uri)
        storages.append(FaultyStorage(open_storage(uri)))
        when.get(len(storages), lambda _: None)(storages[-1])
        return storages[-1]

    monkeypatch.setattr(checkpoints, "open_storage", open_faulty)
    return when


@pytest.mark.parametrize("operation", ["write", "list"])
def test_storage_that_fails_costs_only_that_state(train, tmp_path, caplog, opened, operation):
    opened[3] = lambda storage: storage.fail(operation, lasting=True)
    trainer = train([0.6, 0.8, 0.5, 0.7, 0.6])
    assert trainer.steps_done == 10
    assert kept_steps(only(tmp_path / "runs") / "best") == [8, 2]  # the best of those that could be written
    assert caplog.text.count("the best state so far cannot be kept") == 1
    report = trainer.selection.report
    assert (report.value, report.missed) == (0.7, 0.8)


def test_a_record_that_cannot_be_read_at_the_start_is_read_later_unless_it_is_damaged(
    train, tmp_path, caplog, opened
):
    save = "checkpoint.every_steps=4"
    train([0.6, 0.8, 0.5, 0.7, 0.6], save)
    folder = only(tmp_path / "runs")
    opened[4] = lambda storage: storage.fail("list", lasting=True)
    train([0.6, 0.7], save, "train.max_steps=12", resume=folder)
    assert "it is not known which best state was kept before" in caplog.text
    assert kept_steps(folder / "best") == [4, 2]

    newest = find_states(LocalStorage(str(folder / "best")))[0][0].newest
    (folder / "best" / newest.folder / "state.arrow").write_bytes(b"damaged")
    train([0.7], save, "train.max_steps=12", resume=folder)
    assert "the kept best state does not count" in caplog.text
    assert kept_steps(folder / "best")[0] == 12


def test_a_signal_during_the_save_ends_the_run(train, tmp_path, opened):
    opened[2] = lambda storage: storage.inject(StorageDelay(operation="create", delay_s=0.5))
    asked = []

    def stop_in_the_save(trainer):
        def ask():
            asked.append(trainer.steps_done)
            if len(asked) == 3:  # the first time is before the evaluation
                trainer.stop.leave()

        trainer._leave_if_any_rank_was_signalled = ask

    with pytest.raises(StopRequested):
        train([0.6], before=stop_in_the_save)
    assert asked == [2, 2, 2]


def test_another_metric_or_day_begins_anew_and_another_run_is_refused(train, tmp_path, caplog):
    place = f"checkpoint.uri={tmp_path / 'store'}"
    save = (place, "checkpoint.every_steps=4")
    train([0.6, 0.8, 0.7, 0.7, 0.7], *save)
    best, folder = tmp_path / "store" / "best", only(tmp_path / "runs")
    assert kept_steps(best) == [4, 2]
    with pytest.raises(ValueError, match=rf"holds the best state of run {folder.name}: set checkpoint.uri"):
        train([], place)
    with caplog.at_level("INFO", "dlrm"):
        more = ("train.max_steps=12", "train.keep_best=log_loss")
        train([0.7, 0.75], *save, *more, resume=folder)
    assert (
        "the best state by auc on days [2], which cannot be compared with log_loss on days [2]" in caplog.text
    )
    assert kept_steps(best) == [12, 10]
