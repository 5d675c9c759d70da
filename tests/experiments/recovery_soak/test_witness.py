"""A witness finds every row that is not what it must be, and no other."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.shards.shard import TableShard
from experiments.recovery_soak.verdict import Claim, check_recovery
from experiments.recovery_soak.witness import History, Log, Writer, row_digests

NUM_ROWS = 8


def shard(table="tables.cat_0", offset=0):
    return TableShard(
        table_fqn=table,
        table_shape=(NUM_ROWS + offset, 4),
        row_offset=offset,
        col_offset=0,
        replicated=False,
        weights=torch.zeros(NUM_ROWS, 4),
        optimizer_state={"sum": torch.zeros(NUM_ROWS)},
    )


class Run:
    """Workers with a shard each, that train by adding 1 to some rows."""

    def __init__(self, folder):
        self.folder = folder
        self.shards = [shard(), shard("tables.cat_1", offset=100)]
        self.step = 0
        self.saves = {}
        self.writers = []
        self.begin()

    def begin(self):
        """A new generation of workers, with the rows that there are."""
        for writer in self.writers:
            writer.close()
        self.writers = [Writer(self.folder, self.step, [each]) for each in self.shards]

    def train(self, rows, finished_by=2):
        """A step; the workers from `finished_by` on die before they have finished it."""
        self.saves[self.step] = [each.weights.clone() for each in self.shards]
        for number, (each, writer) in enumerate(zip(self.shards, self.writers, strict=True)):
            ids = torch.tensor(rows) + each.row_offset
            writer.batch(self.step + 1, {each.table_fqn.rpartition(".")[2]: ids.numpy()})
            each.weights[rows] += 1
            if number < finished_by:
                writer.rows(self.step + 1)
        self.step += finished_by == 2

    def load(self, step, shards=(0, 1)):
        for number in shards:
            self.shards[number].weights[:] = self.saves[step][number]

    def check(self, kind, step, save_step=None, mirror_step=None, interrupted=False, **lost):
        gone = {f"tables.{name}": n for name, n in lost.items()}
        claim = Claim(
            kind=kind,
            step=step,
            save_step=save_step,
            mirror_step=mirror_step,
            interrupted=interrupted,
            lost=gone if save_step is not None else {},
            mirrored=gone if mirror_step is not None else {},
        )
        found = [check_recovery(History(self.folder), claim, [each]) for each in self.shards]
        return [each.rows_wrong for each in found], found


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    for rows in ([0, 1], [1, 2], [2, 3]):
        made.train(rows)
    return made


def test_rows_as_they_were_left_are_right(run):
    wrong, found = run.check("process", 3)
    assert wrong == [0, 0]
    assert [each.rows for each in found] == [NUM_ROWS, NUM_ROWS]


@pytest.mark.parametrize("column", ["weights", "sum"])
def test_a_single_changed_value_is_found(run, column):
    run.shards[1].columns[column][5] += 1e-6
    wrong, found = run.check("process", 3)
    assert wrong == [0, 1]
    assert found[1].problem == "tables.cat_1/r100-c0: 1 rows of neither moment"


def test_rows_of_an_interrupted_batch_are_left_out_and_counted(run):
    run.train([4, 5], finished_by=1)
    wrong, found = run.check("process", 3, interrupted=True)
    assert (wrong, [each.rows_interrupted for each in found]) == ([0, 0], [2, 2])
    run.shards[1].weights[6] += 1
    assert run.check("process", 3, interrupted=True)[0] == [0, 1]
    assert run.check("process", 3)[0] == [2, 3], "unless the recovery says that none was"


def test_with_mirrors_a_run_goes_back_a_few_steps_or_has_rows_of_an_older_one(run):
    run.load(2)
    assert run.check("mirror", 2, mirror_step=2)[0] == [0, 0]
    assert run.check("mirror", 3, mirror_step=2, cat_0=2, cat_1=2)[0] == [0, 0]
    assert run.check("mirror", 3, mirror_step=2, cat_0=2, cat_1=1)[0] == [0, 1]
    for rows in ([0], [0], [0]):
        run.train(rows)
    run.load(1)
    assert run.check("mirror", 1, mirror_step=1)[0] == [NUM_ROWS, NUM_ROWS], "too far back"


def test_a_run_may_continue_from_a_step_that_a_worker_without_memory_did_not_finish(run):
    run.train([4, 5], finished_by=1)
    run.load(2, shards=[1])
    assert run.check("partial", 4, 2, cat_1=NUM_ROWS)[0] == [0, 0]


def test_outdated_memory_is_wrong_as_a_whole(run):
    run.load(1)
    wrong, found = run.check("process", 1)
    assert wrong == [NUM_ROWS, NUM_ROWS]
    assert found[0].problem == "continues from step 1, and step 3 was finished"


def test_lost_rows_are_those_of_the_save_that_is_named(run):
    run.load(1, shards=[1])
    wrong, found = run.check("partial", 3, 1, cat_1=NUM_ROWS)
    assert wrong == [0, 0]
    assert [each.rows_restored for each in found] == [0, 3]
    assert run.check("partial", 3, 2, cat_1=NUM_ROWS)[0] == [0, 2]  # rows 1 and 2 changed in between
    assert run.check("partial", 3, 1, cat_1=1)[0] == [0, 2]  # more than were lost
    assert run.check("process", 3)[0] == [0, 3]


def test_a_worker_that_was_killed_before_it_had_written_its_last_step_down_is_not_judged(run):
    run.train([1, 2])
    run.train([3])
    run.train([4], finished_by=1)
    run.step += 1  # which both have finished
    run.load(1, shards=[0])
    wrong, found = run.check("partial", run.step, save_step=1, cat_0=NUM_ROWS)
    assert wrong == [0, 0]
    assert [each.rows_unknown for each in found] == [0, NUM_ROWS]


def test_a_save_newer_than_the_run_is_wrong(run):
    assert run.check("partial", 2, 3, cat_1=NUM_ROWS)[0] == [NUM_ROWS, NUM_ROWS]


def test_a_run_that_returns_to_a_save_has_all_its_rows(run):
    run.load(1)
    assert run.check("full", 1, 1)[0] == [0, 0]
    run.shards[0].weights[3] = 7
    assert run.check("full", 1, 1)[0] == [1, 0]
    assert run.check("full", 2, 1)[0] == [NUM_ROWS, NUM_ROWS]
    run.load(0)
    assert run.check("start", 0)[0] == [0, 0]


def test_after_going_back_the_later_course_counts(run):
    run.load(1)
    run.step = 1
    run.begin()
    run.train([6])
    assert run.check("process", 2)[0] == [0, 0]
    run.load(1, shards=[0])
    assert run.check("partial", 2, 1, cat_0=NUM_ROWS)[0] == [0, 0]
    run.shards[0].weights[2] += 2  # as it was after step 3 of the course that was given up
    assert run.check("partial", 2, 1, cat_0=NUM_ROWS)[0] == [1, 0]


def test_logs_of_a_worker_that_returns_late_do_not_count(run):
    late = run.writers[0]
    run.writers = run.writers[1:]
    run.begin()
    run.shards[0] = replace(run.shards[0], weights=run.shards[0].weights.clone())
    late._shards[0].weights[:] = 9
    late.rows(4)
    late.close()
    assert run.check("process", 3)[0] == [0, 0]


@settings(deadline=None, max_examples=30)
@given(cut=st.integers(1, 400))
def test_a_log_that_was_cut_off_has_what_was_before(tmp_path_factory, cut):
    run = Run(tmp_path_factory.mktemp("logs"))
    before = [row_digests(run.shards[0])]
    for rows in ([0, 1], [1, 2], [2, 3]):
        run.train(rows)
        before.append(row_digests(run.shards[0]))
    path = next(path for path in run.folder.glob("*.log") if "tables.cat_0/r0-c0" in Log(path).shards)
    path.write_bytes(path.read_bytes()[:-cut])
    log = Log(path)
    if log.is_whole:
        for step in range(log.last + 1):
            assert (log.digests("tables.cat_0/r0-c0", step) == before[step]).all()
