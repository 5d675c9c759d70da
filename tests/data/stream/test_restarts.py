"""Files that go, come or change while no run reads: each record once, or in a count."""

import logging
import os
from unittest.mock import Mock

import pytest

from data.stream.files import FileReader
from data.stream.listing import PATIENCE_S
from tests.data.stream.folders import NOW_S, restarted, same_partition, write, write_labels


@pytest.mark.parametrize("fate", ["deleted", "replaced"])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_file_that_goes_while_no_run_reads_is_told_and_its_rest_counted_once(
    tmp_path, clock, caplog, monkeypatch, raw_dataset, fate, ending
):
    monkeypatch.setattr("data.stream.files.BLOCK_BYTES", 4000)
    folder, dataset = tmp_path / "in", raw_dataset if ending == "jsonl" else None
    folder.mkdir()

    def put(name, num_records, age_s):
        path = write_labels(folder / f"{name}.{ending}", num_records, label=0)
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
        return path

    whole, read = put("whole", 100, age_s=200), put("cut", 1000, age_s=100)
    states = restarted(folder, clock, {}, chunk=300, reads=3, dataset=dataset)
    num_trained = sum(each.trained for each in states.values())
    assert 100 < num_trained < 1100
    read.unlink()
    whole.unlink()  # all of it was read: this is how users make room
    new = 50  # fewer than those that were read
    put("cut" if fate == "replaced" else "other", new, age_s=50)
    with caplog.at_level(logging.WARNING):
        again = restarted(folder, clock, states, chunk=5000, reads=8, dataset=dataset, pause_s=PATIENCE_S / 2)
    assert sum(each.left_out for each in again.values()) == 1100 - num_trained
    assert sum(each.trained for each in again.values()) == num_trained + new
    assert sum(each.bad for each in again.values()) == 0
    assert caplog.text.count(f"cut.{ending} was deleted, renamed or replaced before all of it was read") == 1
    assert f"whole.{ending}" not in caplog.text
    assert restarted(folder, clock, again, chunk=5000, reads=5, dataset=dataset) == again, "once"


def test_a_file_that_goes_while_no_run_reads_is_part_of_what_the_backlog_leaves_out(tmp_path, clock):
    """Of the oldest records, which the policy leaves out, those that are gone are the first."""
    first, second = same_partition(2)
    cut = write(tmp_path / first, range(1000), age_s=100)
    states = restarted(tmp_path, clock, {}, chunk=300, reads=1, backlog=1000)
    cut.unlink()
    write(tmp_path / second, range(1000, 2000), age_s=90)
    found = restarted(tmp_path, clock, states, chunk=5000, reads=8, backlog=1000, pause_s=PATIENCE_S / 2)
    (again,) = found.values()
    assert (again.trained, again.left_out, again.bad) == (300 + 900, 700 + 100, 0), "0.9 of the limit is kept"


@pytest.mark.parametrize("fate", ["returns", "stays away", "is replaced"])
def test_a_part_of_the_folder_that_is_away_at_a_restart(tmp_path, clock, caplog, fate):
    """Its files were found and not read, most not begun: they are missed like those of a living run."""
    part, away = tmp_path / "in" / "part", tmp_path / "away"
    for number in range(30):  # of all of which one is missed for a minute, not each
        write(part / f"{number}.parquet", range(100 * number, 100 * number + 100), age_s=200 - number)
    write(tmp_path / "in" / "new.parquet", range(5000, 6000), age_s=50)
    states = restarted(tmp_path / "in", clock, {}, chunk=50, reads=7)
    assert sum(each.trained for each in states.values()) == 350
    part.rename(away)
    states = restarted(tmp_path / "in", clock, states, chunk=5000, reads=10, pause_s=PATIENCE_S / 20)
    assert sum(each.trained + each.left_out for each in states.values()) == 350, "none overtakes them"
    if fate == "returns":
        away.rename(part)
    elif fate == "is replaced":
        write(part / "3.parquet", range(10), age_s=40)
    states = restarted(tmp_path / "in", clock, states, chunk=5000, reads=50, pause_s=PATIENCE_S / 20)
    trained, left_out = {
        "returns": (4000, 0),
        "stays away": (350 + 1000, 2650),
        "is replaced": (350 + 1000 + 10, 2650),
    }[fate]
    assert sum(each.trained for each in states.values()) == trained
    assert sum(each.left_out for each in states.values()) == left_out
    assert "3.parquet is not there now: waiting for it, a minute at most" in caplog.text
    if fate == "stays away":
        away.rename(part)
        again = restarted(tmp_path / "in", clock, states, chunk=5000, reads=5)
        assert again == states, "what was left out is not counted twice"


def test_a_folder_that_is_empty_at_a_restart_is_waited_for(tmp_path, clock, caplog):
    """As a mount point is before the disk is mounted."""
    folder = tmp_path / "in"
    write(folder / "1.parquet", range(100))
    states = restarted(folder, clock, {}, chunk=30, reads=1)
    folder.rename(tmp_path / "away")
    folder.mkdir()
    assert restarted(folder, clock, states, chunk=30, reads=50, pause_s=PATIENCE_S) == states
    assert "in has no files any more, and not all of them have been read: looking again" in caplog.text
    folder.rmdir()
    (tmp_path / "away").rename(folder)
    (state,) = restarted(folder, clock, states, chunk=30, reads=5).values()
    assert (state.trained, state.left_out, state.bad) == (100, 0, 0)


def test_files_that_were_read_and_are_away_at_a_restart_do_not_come_late(tmp_path, clock, caplog):
    first, second, third = same_partition(3)
    read = write(tmp_path / first, range(100), age_s=100)
    write(tmp_path / second, range(100, 200), age_s=90)
    states = restarted(tmp_path, clock, {}, chunk=100, reads=2)
    read.rename(tmp_path / "_away")
    write(tmp_path / third, range(200, 250), age_s=110)
    states = restarted(tmp_path, clock, states, chunk=100, reads=3)
    assert states.late == 50
    (tmp_path / "_away").rename(read)
    again = restarted(tmp_path, clock, states, chunk=100, reads=3)
    assert (again, again.late) == (states, 50)
    assert first not in caplog.text
    assert f"{third} is older than files that were read already" in caplog.text


@pytest.mark.parametrize("is_late", [False, True])
def test_a_file_that_was_read_and_has_a_new_time_at_a_restart_is_told(tmp_path, clock, caplog, is_late):
    first, second = same_partition(2)
    write(tmp_path / first, range(100), age_s=100)
    states = restarted(tmp_path, clock, {}, chunk=100, reads=2)
    if is_late:
        write(tmp_path / second, range(100, 150), age_s=110)
        states = restarted(tmp_path, clock, states, chunk=100, reads=3)
    touched = tmp_path / (second if is_late else first)
    os.utime(touched, (NOW_S - 50, NOW_S - 50))
    (again,) = restarted(tmp_path, clock, states, chunk=100, reads=3).values()
    assert again.trained == (150 if is_late else 200)
    assert ("has changed since it was found: all its records count as new" in caplog.text) != is_late


def test_a_file_that_cannot_be_read_after_a_restart_is_counted(tmp_path, clock, monkeypatch):
    (name,) = same_partition(1)
    write(tmp_path / name, range(700))
    states = restarted(tmp_path, clock, {}, chunk=300, reads=2)
    for method in ("pieces", "_group"):
        monkeypatch.setattr(FileReader, method, Mock(side_effect=OSError(5, "EIO")))
    (state,) = restarted(tmp_path, clock, states, chunk=300, reads=10, pause_s=PATIENCE_S / 2).values()
    assert (state.trained, state.left_out, state.bad) == (600, 0, 100)


def test_of_many_files_that_were_read_a_position_keeps_the_last_ones(tmp_path, clock, monkeypatch, caplog):
    monkeypatch.setattr("data.stream.units.KEPT", 3)
    names = same_partition(9)
    for number, name in enumerate(names[:8]):
        write(tmp_path / name, range(10 * number, 10 * number + 10), age_s=100 - number)
    states = restarted(tmp_path, clock, {}, chunk=100, reads=10)
    write(tmp_path / names[8], range(80, 90), age_s=50)
    states = restarted(tmp_path, clock, states, chunk=100, reads=3)
    again = restarted(tmp_path, clock, states, chunk=100, reads=3)
    assert (again, again.known, again.late) == (states, states.known, 0), "older ones count as read"
    assert sum(each.trained for each in again.values()) == 90
    assert "is older than" not in caplog.text
