"""What a run writes down of itself, through its generations."""

import json
from types import SimpleNamespace

import pytest

from cpr.checkpoint.storage.base import open_storage
from cpr.errors import CheckpointError, LockedError
from cpr.estimator.history import HISTORY_PATH, read_history
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Ending, Recovery, RowOrigin
from cpr.saving import history_writer as module
from cpr.saving.history_writer import HistoryWriter


class Clock:
    """One clock for all, moved by hand."""

    def __init__(self):
        self.now = 1e9

    def time(self):
        return self.now

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def begin(tmp_path, clock):
    progress = RunProgress()

    def work(kind, *, lost_share=0.0, seconds=None, storage=None, check_lock=lambda: 0, **told):
        generation = len(progress.recoveries)
        story = Recovery(
            kind=kind,
            generation=generation,
            step=progress.steps_done,
            lost_share=lost_share,
            world_size=4,
            seconds=seconds or {},
            **{"reason": "", **told},
        )
        progress.recoveries = [*progress.recoveries, story]
        storage = storage or open_storage(str(tmp_path))
        return HistoryWriter(
            storage, progress, check_lock, nodes=2, samples_total=1000, row_share=0.125
        ), progress

    return work


def train(writer, progress, clock, steps, step_s=2.0):
    for _ in range(steps):
        clock.now += step_s
        progress.step(10)
        writer.step()


def save(kind="base", num_bytes=100, **options):
    return SimpleNamespace(
        **{
            "kind": kind,
            "is_over": True,
            "seconds": 3.0,
            "blocked_s": 0.5,
            "longest_blocked_s": 0.5,
            "manifest": SimpleNamespace(num_bytes=num_bytes),
            **options,
        }
    )


def stored(tmp_path, writer):
    writer.finish()
    return read_history(open_storage(str(tmp_path)))


def test_saves_are_written_down_once_they_are_over(begin, clock, tmp_path):
    writer, progress = begin("start")
    train(writer, progress, clock, 3)
    late = save(kind="rows", num_bytes=7, is_over=False)
    writer.note_save(save())
    writer.note_save(late)
    writer.note_save(save(manifest=None, seconds=None))  # it failed
    assert writer.is_saving
    train(writer, progress, clock, 1)
    assert [each.kind for each in writer.history.saves] == ["base"]
    late.is_over = True
    train(writer, progress, clock, 2)
    assert not writer.is_saving
    history = stored(tmp_path, writer)
    assert [(each.step, each.num_bytes, each.share) for each in history.saves] == [(3, 100, 1), (3, 7, 0.125)]
    assert (history.world_size, history.nodes, history.step_s, history.steps_done) == (4, 2, 2.0, 6)
    assert (history.samples_done, history.samples_total, history.elapsed_s) == (60, 1000, 12.0)


def test_failed_saves_are_counted_through_all_generations(begin, tmp_path):
    for kind in ("start", "resume"):
        writer, _ = begin(kind)
        writer.note_failed_save()
        assert stored(tmp_path, writer).failed_saves == (1 if kind == "start" else 2)


def test_a_save_costs_what_the_steps_beside_it_take_longer(begin, clock, tmp_path):
    writer, progress = begin("start")
    train(writer, progress, clock, 5)
    under_way = save(is_over=False, longest_blocked_s=0.0)
    writer.note_save(under_way)
    train(writer, progress, clock, 3, step_s=3.0)
    under_way.is_over, under_way.longest_blocked_s = True, 0.75
    train(writer, progress, clock, 4)
    history = stored(tmp_path, writer)
    (cost,) = history.saves
    assert cost.blocked_s == 0.75  # on the rank where training waited longest
    assert cost.cost_s == pytest.approx(3.0)
    assert history.step_s == 2.0
    assert history.O_blocked == pytest.approx(3.0)


def test_a_failure_is_told_with_its_workers_and_rows(begin, clock, tmp_path):
    writer, progress = begin("start")
    train(writer, progress, clock, 5)
    writer.finish()
    progress.add_pls(0.25)
    dead = tuple(Ending(rank=rank, pid=1, host="a", why=f"it broke \udc80 {'x ' * 300}") for rank in range(6))
    origins = [RowOrigin(table_fqn="t", adopted=3, lost=1), RowOrigin(table_fqn="u", adopted=4)]
    told = {"dead": dead, "sources": tuple(origins), "pls_added": 0.25, "reason": "memory lost \udc80"}
    writer, progress = begin("partial", **told)
    (failure,) = stored(tmp_path, writer).failures
    assert (failure.step, failure.reason, failure.pls_added) == (5, "memory lost ?", 0.25)
    assert failure.rows == {"adopted": 7, "moved": 0, "mirrored": 0, "lost": 1}
    assert len(failure.dead) == 5
    assert failure.dead[0].startswith("rank 0 (process 1 on a): it broke ? x x")
    assert max(map(len, failure.dead)) <= 300
    assert failure.dead[-1] == "and 2 more"
    assert stored(tmp_path, writer).pls == 0.25


def test_a_failure_costs_until_the_first_step_and_the_clock_continues_meanwhile(begin, clock, tmp_path):
    writer, progress = begin("start")
    train(writer, progress, clock, 5)
    writer.note_save(save())
    train(writer, progress, clock, 1)
    writer._writer.join()
    train(writer, progress, clock, 4)  # of which at most one is written down; then they die
    writer._writer.join()
    clock.now += 30
    writer, progress = begin("partial", lost_share=0.5, seconds={"restart": 20.0, "restore": 10.0})
    progress.note_seconds({"restart": 20.0, "restore": 10.0, "first_step": 5.0})
    train(writer, progress, clock, 1, step_s=5.0)
    history = stored(tmp_path, writer)
    (failure,) = history.failures
    assert (failure.kind, failure.lost_share, failure.nodes_lost) == ("partial", 0.5, 1.0)
    assert failure.elapsed_s == pytest.approx(20.0)
    assert failure.seconds["first_step"] == 5.0
    assert history.elapsed_s == pytest.approx(55.0)
    assert len(history.saves) == 1


def test_a_pause_of_the_run_is_no_time_of_it_and_no_failure(begin, clock, tmp_path):
    writer, progress = begin("start")
    train(writer, progress, clock, 5)
    stored(tmp_path, writer)
    clock.now += 1e6
    writer, progress = begin("resume")
    train(writer, progress, clock, 5)
    history = stored(tmp_path, writer)
    assert history.elapsed_s == pytest.approx(20.0)
    assert history.failures == ()


def test_another_file_of_that_name_is_said_and_a_new_history_begins(begin, tmp_path, caplog):
    (tmp_path / HISTORY_PATH).write_text("[]")
    writer, _ = begin("resume")
    assert "starts over" in caplog.text
    writer.finish()
    assert json.loads((tmp_path / HISTORY_PATH).read_text())["format"] == "cpr-history"


@pytest.mark.parametrize("steps", [0, 1], ids=["at the end", "after a step"])
def test_a_history_that_cannot_be_read_for_a_while_is_kept_and_continued(
    begin, clock, tmp_path, monkeypatch, caplog, steps
):
    writer, progress = begin("start")
    train(writer, progress, clock, 5)
    writer.note_save(save())
    train(writer, progress, clock, 1)
    before = stored(tmp_path, writer)

    def fail(storage):
        raise CheckpointError("the storage does not answer")

    monkeypatch.setattr(module, "read_history", fail)
    clock.now += 30
    writer, progress = begin("process", seconds={"restart": 10.0})
    writer._writer.join()
    assert "the storage does not answer" in caplog.text
    assert read_history(open_storage(str(tmp_path))) == before
    writer.note_save(save(num_bytes=7))
    monkeypatch.setattr(module, "read_history", read_history)
    train(writer, progress, clock, steps)
    history = stored(tmp_path, writer)
    assert [each.num_bytes for each in history.saves] == [100, 7]
    (failure,) = history.failures
    assert failure.elapsed_s == pytest.approx(before.elapsed_s + 20)
    assert history.elapsed_s == pytest.approx(before.elapsed_s + 30 + 2 * steps)
    assert history.step_s == before.step_s


def test_a_run_whose_directory_is_anothers_by_now_leaves_its_history_alone(begin, clock, tmp_path, caplog):
    def check_lock():
        raise LockedError("another run has taken it over")

    (tmp_path / HISTORY_PATH).write_text("of another run")
    writer, progress = begin("start", check_lock=check_lock)
    train(writer, progress, clock, 3)
    writer.finish()
    assert (tmp_path / HISTORY_PATH).read_text() == "of another run"
    assert "another run has taken it over" in caplog.text


def test_storage_that_fails_stops_nothing(begin, clock, caplog):
    def create(path):
        raise CheckpointError("the disk is gone")

    writer, progress = begin("start", storage=SimpleNamespace(create=create))
    train(writer, progress, clock, 3)
    writer.finish()
    assert "the disk is gone" in caplog.text
