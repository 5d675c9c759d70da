"""`PartialRecovery` in a world of one: every way to end, and what the next worker makes of it."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib import metadata
from unittest.mock import Mock, create_autospec

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import cpr
from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.ownership.records import write_owner
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import (
    MismatchError,
    NoProgressError,
    NotEnoughMemoryError,
    RunStoppedError,
    SaveFailedError,
    SaveRefusedError,
    StartOverError,
    UnreadableMemoryError,
)
from cpr.estimator.history import read_history
from cpr.faults import AtStep, InjectedError, Plan, Raise, StorageError
from cpr.recovery.restore.restorer import RowTransfer
from cpr.recovery.run.report import KILLED
from cpr.saving.cadence import FIRST_STEPS
from cpr.shards import find_shards
from tests.cpr.recovery.workers import BATCH, assert_same


def test_a_first_run_starts_and_says_so(new_worker):
    worker = new_worker(restarted=False).restore()
    assert (worker.story.kind, worker.story.generation, worker.recovery.batches_to_skip) == ("start", 0, 0)
    worker.train(3)
    assert (worker.recovery.steps_done, worker.recovery.samples_done) == (3, 3 * BATCH)
    assert worker.recovery.recoveries[0].seconds.keys() >= {"imports", "rendezvous", "build", "first_step"}


SEQUENCES = {
    "sequences": {"s": 30, "t": 25},
    "layout": {"a": "tw", "b": "cw", "c": "dp", "s": "rw", "t": "tw"},
}
"""Tables that are not pooled beside those that are."""
COLLECTIONS = pytest.mark.parametrize("tables", [{}, SEQUENCES], ids=["bags", "sequences"])


@COLLECTIONS
def test_killed_between_steps_nothing_is_lost_and_nothing_is_read(new_worker, tables):
    worker = new_worker(restarted=False, **tables).restore().train(12)
    alive = worker.values()
    worker.die()

    again = new_worker(**tables).restore()
    assert_same(again.values(), alive)
    story = again.story
    assert (story.kind, story.step, story.interrupted) == ("process", 12, False)
    assert (story.bytes_read, story.pls_added, again.recovery.pls) == (0, 0.0, 0.0)
    assert [ending.why for ending in story.dead] == [KILLED]


def test_memory_that_cannot_be_mapped_for_a_while_is_not_given_up(new_worker, monkeypatch):
    """The worker ends, so that torchrun starts it again, rather than going on without what is in memory."""
    worker = new_worker(restarted=False).restore().train(12)
    alive = worker.values()
    worker.die()

    unlucky = new_worker()
    monkeypatch.setattr("cpr.resident.regions.PATIENCE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_file", _no_memory)
        with pytest.raises(UnreadableMemoryError, match=r"rank 0 on .* Cannot allocate memory"):
            unlucky.restore()
    unlucky.die()

    again = new_worker().restore()
    assert_same(again.values(), alive)
    assert (again.story.kind, again.story.step, again.story.bytes_read) == ("process", 12, 0)


def _no_memory(*_args, **_kwargs):
    raise RuntimeError("unable to mmap 5 bytes from file </proc/self/fd/9>: Cannot allocate memory (12)")


def test_failures_that_were_asked_for_strike_an_unchanged_script_once(new_worker, tmp_path, monkeypatch):
    plan = Plan(schedules=(AtStep(step=3, kind=StorageError()), AtStep(step=7, kind=Raise())))
    (tmp_path / "faults.json").write_text(json.dumps(plan.to_json()))
    monkeypatch.setenv("CPR_FAULTS", str(tmp_path / "faults.json"))
    worker = new_worker(restarted=False).restore().train(5)
    with pytest.raises(SaveFailedError, match="No space left"):
        worker.wait_for_save()
    with pytest.raises(InjectedError):
        worker.train(4)
    worker.die()
    again = new_worker().restore()
    assert again.recovery.steps_done == 7
    again.train(3).wait_for_save()
    assert again.recovery.checkpointer.newest_step == 10


def test_failures_that_cannot_be_injected_are_refused_before_a_model_is_built(
    new_worker, tmp_path, monkeypatch
):
    path = tmp_path / "faults.json"
    monkeypatch.setenv("CPR_FAULTS", str(path))
    with pytest.raises(ValueError, match=r"faults\.json\) cannot be read: No such file"):
        cpr.PartialRecovery(str(tmp_path / "checkpoint"), resident_root=str(tmp_path))
    path.write_text(json.dumps(Plan(schedules=(AtStep(step=3, kind=Raise()),)).to_json()))
    recovery = cpr.PartialRecovery("s3://bucket/checkpoint", resident_root=str(tmp_path))
    with pytest.raises(ValueError, match="directory on a file system, not s3://bucket/checkpoint"):
        recovery.building().__enter__()


@COLLECTIONS
def test_it_continues_bit_for_bit_as_if_nothing_had_happened(new_worker, tables):
    new_worker(restarted=False, **tables).restore().train(12).die()
    again = new_worker(**tables).restore().train(8)
    values = again.values()
    again.die()
    undisturbed = new_worker(restarted=False, folder=again_folder(again), save_every_steps=0, **tables)
    undisturbed.restore().train(20)
    assert_same(undisturbed.values(), values)


def again_folder(worker):
    return worker.recovery.checkpointer._storage.uri + "-other"


def test_a_step_that_was_interrupted_is_skipped_and_no_batch_is_trained_twice(new_worker):
    worker = new_worker(restarted=False).restore().train(4)
    worker.forward_backward()  # rows have changed, the step is not finished
    worker.die()
    again = new_worker().restore()
    assert (again.story.interrupted, again.recovery.batches_to_skip, again.recovery.batches_done) == (
        True,
        1,
        5,
    )
    again.forward_backward()  # and again
    assert again.trained == [5]
    again.die()
    third = new_worker().restore()
    assert (third.recovery.steps_done, third.recovery.batches_to_skip) == (4, 2)
    third.train(2)
    assert third.trained == [6, 7]
    assert (third.recovery.steps_done, third.recovery.batches_done) == (6, 8)


@pytest.mark.parametrize("end", ["closed", "stopped"])
def test_a_batch_that_was_left_out_at_the_end_of_the_data_is_not_left_out_again(new_worker, wipe, end):
    worker = new_worker(restarted=False).restore().train(4)
    worker.forward_backward()
    worker.die()
    again = new_worker().restore()  # its position is behind that batch, which was the last
    if end == "closed":
        again.recovery.close()
        dist.destroy_process_group()
    else:
        again.recovery.note_skipped()
        assert again.recovery.save_now(60)
        again.die()
        wipe()
    later = new_worker(restarted=False).restore()
    assert (later.position.next, later.recovery.batches_to_skip, later.recovery.batches_done) == (5, 0, 5)


def test_a_stop_saves_and_whoever_is_started_again_continues_in_memory(new_worker):
    worker = new_worker(restarted=False).restore().train(7)
    alive = worker.values()
    assert worker.recovery.save_now(60)
    worker.die(RuntimeError("stopped"))
    again = new_worker().restore()
    assert (again.story.kind, again.story.step, again.story.bytes_read) == ("process", 7, 0)
    assert_same(again.values(), alive)
    assert again.recovery.checkpointer.newest_step == 7
    assert max(again.recovery._progress.saves) == 7


def test_a_worker_that_dies_again_before_it_trains_changes_nothing(new_worker):
    worker = new_worker(restarted=False).restore().train(4)
    worker.forward_backward()
    alive = worker.values()
    worker.die()
    new_worker().die()  # after the meeting, with the model built
    new_worker().restore().die()
    again = new_worker().restore()
    assert again.recovery.batches_to_skip == 1
    for name, value in again.values().items():
        if name.endswith(("/weights", "/sum")) and "bags.c" not in name:  # c is replicated: as after step 4
            assert torch.equal(value, alive[name]), name
    assert [each.kind for each in again.recovery.recoveries] == ["start", "process", "process"]


@COLLECTIONS
def test_all_memory_gone_is_a_full_recovery_to_the_exact_position(new_worker, wipe, tables):
    worker = new_worker(restarted=False, resume=False, **tables).restore().train(10).wait_for_save()
    saved = worker.values()
    worker.train(2).die()
    wipe()
    again = new_worker(resume=False, **tables).restore()  # not a new run, whatever new runs are to do
    assert (again.story.kind, again.story.step, again.story.save_step) == ("full", 10, 10)
    assert "no worker's memory is left" in again.story.reason
    assert_same(again.values(), saved)
    again.train(1)
    assert again.trained == [10]


def test_all_memory_gone_before_the_first_save_begins_at_the_beginning(new_worker, wipe):
    first = new_worker(restarted=False).restore()
    fresh = first.values()
    first.train(3).die()
    wipe()
    again = new_worker().restore()
    assert (again.story.kind, again.story.step) == ("full", 0)
    assert "nothing was saved yet: training begins at the beginning" in again.story.reason
    assert_same(again.values(), fresh)


def test_a_warm_start_is_done_again_until_something_is_saved_and_then_never(new_worker, tmp_path, wipe):
    other = new_worker(restarted=False, folder=tmp_path / "other").restore().train(7)
    other.recovery.save_now()
    theirs = {name: value for name, value in other.values().items() if name != "next"}
    other.die()
    wipe()
    starts = []

    def warm(checkpointer):
        starts.append(checkpointer.warm_start(str(tmp_path / "other"), ["optimizer0"]).step)

    def check_start(worker):
        assert (worker.recovery.steps_done, worker.position.next, worker.recovery.pls) == (0, 0, 0)
        assert_same({**worker.values()}, {**theirs, "next": torch.tensor(0)})

    first = new_worker(restarted=False, resume=False).restore(warm)
    check_start(first)
    expected = first.train(4).values()
    first.die()
    wipe()  # before the first save, which comes after 5 steps
    second = new_worker(resume=False).restore(warm)
    check_start(second)
    assert_same(second.train(4).values(), expected)
    second.die()
    third = new_worker(resume=False).restore(warm)
    assert third.story.kind == "process"
    saved = third.train(1).wait_for_save().values()
    third.train(1).die()
    wipe()
    fourth = new_worker(resume=False).restore(warm)
    assert (fourth.story.kind, fourth.story.step) == ("full", 5)
    assert_same(fourth.values(), saved)
    assert starts == [7, 7]


def damage(worker_memory, name):
    (path,) = worker_memory.glob(f"*/*/*/{name}")
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


@pytest.mark.parametrize("what", ["marks", "layout.json"])
def test_damaged_memory_is_not_used(new_worker, tmp_path, what):
    worker = new_worker(restarted=False).restore().train(10).wait_for_save()
    saved = worker.values()
    worker.train(1).die()
    damage(tmp_path / "memory", what)
    again = new_worker().restore()
    assert again.story.kind == "full"
    assert any(what in refused for refused in again.story.refused)
    assert_same(again.values(), saved)


def test_memory_of_no_use_before_the_first_save_is_freed_and_the_next_generation_starts_over(
    new_worker, tmp_path
):
    first = new_worker(restarted=False).restore()
    fresh = first.values()
    first.train(2).die()
    for path in (tmp_path / "memory").glob("*/*/*/replica-?"):
        path.write_bytes(b"\xff" * 640)
    second = new_worker()
    with pytest.raises(StartOverError, match="memory has been freed"):
        second.restore()
    second.die()
    third = new_worker().restore()
    assert (third.story.kind, third.story.step) == ("full", 0)
    assert_same(third.values(), fresh)


def test_what_was_put_back_before_all_must_go_back_to_the_beginning_is_not_trained_on(new_worker):
    """The replicated table does not fit, which shows when dense parameters and position are in place."""
    options = {"save_every_steps": 0, "optimizer": torch.optim.SGD}
    new_worker(restarted=False, **options).restore().train(3).die()
    options |= {"layout": {"a": "rw", "b": "tw", "c": "dp"}, "rows": {"a": 100, "b": 40, "c": 21}}
    second = new_worker(**options)
    with pytest.raises(StartOverError, match="memory has been freed"):
        second.restore()
    assert not second.recovery.tables_adopted
    second.die()
    third = new_worker(**options).restore()
    assert (third.story.kind, third.story.step, third.position.next) == ("full", 0, 0)


def test_another_model_means_full_recovery_which_says_what_differs(new_worker):
    new_worker(restarted=False).restore().train(6).wait_for_save().die()
    again = new_worker(rows={"a": 100, "b": 41, "c": 20})
    with pytest.raises(MismatchError, match="grow:b"):
        again.restore()


def end(worker):
    worker.recovery.close()
    dist.destroy_process_group()


GROWN = {"a": 150, "b": 41, "c": 25}
GROWS = cpr.Changes.of("grow:*")


def test_after_growth_memory_of_the_smaller_tables_is_never_mixed_in(new_worker):
    """Live memory is ahead of the save: the rest would be of another step than the rows."""
    new_worker(restarted=False).restore().train(5).wait_for_save().train(4).die()
    grown = new_worker(rows=GROWN)
    assert not grown.recovery.tables_adopted
    built = whole(find_shards(grown.model))
    grown.restore(changes=GROWS)
    assert (grown.story.kind, grown.story.step, grown.position.next) == ("full", 5, 5)
    for name, table in whole_tables(grown).items():
        old = {"a": 100, "b": 40, "c": 20}[name[-1]]
        assert torch.equal(table[old:], built[name][old:])
        assert not torch.equal(table[:old], built[name][:old])


@pytest.mark.parametrize("priority", [None, cpr.PriorityConfig(scheme="mfu", ratio=0.5)])
def test_after_growth_a_lost_node_gets_its_rows_from_saves_of_the_grown_tables(new_worker, wipe, priority):
    options = {"priority": priority, "save_every_steps": 4}
    end(new_worker(restarted=False, **options).restore().train(5))
    options["rows"] = GROWN
    grown = new_worker(restarted=False, **options).restore(changes=GROWS)
    assert (grown.story.kind, grown.story.step) == ("resume", 5)
    grown.train(2)
    alive = grown.values()
    grown.die()

    second = new_worker(**options).restore(changes=GROWS)
    assert second.story.kind == "process", "its memory is of the grown tables"
    assert_same(second.values(), alive)
    second.die()
    wipe()

    third = new_worker(**options).restore(changes=GROWS)
    assert (third.story.kind, third.story.step) == ("full", 6 if priority else 5)
    third.train(12).wait_for_save()
    alive = third.values()
    end(third)
    last = new_worker(restarted=False, **options).restore()
    assert last.story.step == third.recovery.steps_done
    assert_same(last.values(), alive)


def test_new_rows_that_were_trained_do_not_pass_for_initial_ones(new_worker, tmp_path):
    """Adopted memory holds them, when all must go back to a save of the smaller tables."""
    end(new_worker(restarted=False).restore().train(5))
    options = {"rows": GROWN, "save_every_steps": 0}
    grown = new_worker(restarted=False, **options).restore(changes=GROWS)
    loaded = grown.values()
    grown.train(2).die()
    for path in (tmp_path / "memory").glob("*/*/*/replica-?"):
        path.write_bytes(b"\xff" * 640)
    second = new_worker(**options)
    assert second.recovery.tables_adopted
    with pytest.raises(StartOverError, match="what was saved is of other tables"):
        second.restore(changes=GROWS)
    second.die()
    third = new_worker(**options).restore(changes=GROWS)
    assert (third.story.kind, third.story.step) == ("full", 5)
    assert_same(third.values(), loaded)


def test_another_layout_moves_rows_that_are_not_pooled(new_worker):
    worker = new_worker(restarted=False, **SEQUENCES).restore().train(7)
    rows = whole_tables(worker)
    worker.die()
    options = {**SEQUENCES, "layout": {"a": "cw", "b": "tw", "c": "dp", "s": "tw", "t": "cw"}}
    again = new_worker(**options).restore()
    assert (again.story.kind, again.story.step, again.story.bytes_read) == ("process", 7, 0)
    assert_same(whole_tables(again), rows)


def test_another_layout_moves_rows(new_worker):
    worker = new_worker(restarted=False).restore().train(7)
    rows = whole_tables(worker)
    sums = [each.optimizer_state["sum"].clone() for each in worker.recovery.checkpointer.shards[:3]]
    worker.die()
    again = new_worker(layout={"a": "rw", "b": "tw", "c": "dp"}).restore()
    a, b, _ = again.recovery.checkpointer.shards
    assert torch.equal(a.optimizer_state["sum"], sums[0])
    assert torch.equal(
        b.optimizer_state["sum"], (sums[1].double() + sums[2]).div(2).float()
    )  # of both halves
    assert (again.story.kind, again.story.step, again.story.bytes_read) == ("process", 7, 0)
    assert_same(whole_tables(again), rows)
    assert again.story.bytes_moved > 0
    again.train(2)
    alive = again.values()
    again.die()
    third = new_worker(layout={"a": "rw", "b": "tw", "c": "dp"}).restore()
    assert third.story.bytes_moved == 0
    assert_same(third.values(), alive)


def combined(worker):
    """As in TorchRec's example: a fused part, and one that is made in the first step."""
    parameters = {
        name: each
        for name, each in worker.model.named_parameters()
        if not hasattr(each, "_in_backward_optimizers") and each.numel()
    }
    rest = KeyedOptimizerWrapper(parameters, lambda chosen: torch.optim.Adam(chosen, lr=0.1))
    worker.optimizers = [CombinedOptimizer([worker.model.fused_optimizer, rest])]
    return worker


@pytest.mark.parametrize(("loses_memory", "kind", "step"), [(False, "process", 7), (True, "full", 5)])
def test_a_combined_optimizer_with_a_fused_part_continues_as_if_nothing_had_happened(
    new_worker, wipe, tmp_path, loses_memory, kind, step
):
    alone = combined(new_worker(restarted=False, folder=tmp_path / "alone")).restore().train(10)
    uninterrupted = alone.values()
    alone.die()
    wipe()
    combined(new_worker(restarted=False)).restore().train(5).wait_for_save().train(2).die()
    if loses_memory:
        wipe()
    again = combined(new_worker()).restore()
    assert (again.story.kind, again.story.step) == (kind, step)
    assert_same(again.train(10 - step).values(), uninterrupted)


def test_an_optimizer_of_data_parallel_tables_alone_makes_its_state_late(new_worker):
    worker = new_worker(restarted=False, optimizer=torch.optim.Adam, apart=True).restore().train(3)
    for optimizer in worker.optimizers:
        optimizer.param_groups[0]["lr"] = 0.25
    alive = worker.train(1).values()
    worker.die()
    again = new_worker(optimizer=torch.optim.Adam, apart=True).restore()
    assert again.story.kind == "process"
    assert_same(again.values(), alive)
    assert [optimizer.param_groups[0]["lr"] for optimizer in again.optimizers] == [0.25, 0.25]


def test_a_table_that_becomes_data_parallel_or_ceases_to_be_comes_from_the_checkpoint(new_worker):
    adagrad = {"optimizer": torch.optim.Adagrad, "fused": EmbOptimType.EXACT_ADAGRAD, "apart": True}
    sharded, replicated = ({"a": "tw", "b": "cw", "c": each} for each in ("tw", "dp"))
    worker = new_worker(restarted=False, layout=sharded, **adagrad)
    saved = whole_tables(worker.restore().train(5).wait_for_save())
    assert len(worker.optimizers) == 1
    worker.train(2).die()
    again = new_worker(layout=replicated, **adagrad).restore()
    assert (again.story.kind, again.story.step, len(again.optimizers)) == ("full", 5, 2)
    assert_same(whole_tables(again), saved)
    again.train(2)
    alive = again.values()
    again.die()
    third = new_worker(layout=replicated, **adagrad).restore()
    assert third.story.kind == "process"
    assert_same(third.values(), alive)
    third.train(3).wait_for_save()
    saved = whole_tables(third)
    third.die()
    back = new_worker(layout=sharded, **adagrad).restore()
    assert (back.story.kind, back.story.step) == ("partial", 10)
    assert_same(whole_tables(back), saved)


@pytest.mark.parametrize(("max_pls", "kind"), [(0.05, "partial"), (0.01, "full")])
def test_a_failure_that_costs_more_than_max_pls_is_recovered_fully_before_any_row_is_moved(
    new_worker, monkeypatch, max_pls, kind
):
    adagrad = {"optimizer": torch.optim.Adagrad, "fused": EmbOptimType.EXACT_ADAGRAD, "apart": True}
    adagrad["policy"] = cpr.RecoveryPolicy(max_pls=max_pls)
    worker = new_worker(restarted=False, **adagrad).restore().train(5).wait_for_save()
    saved, charged = whole_tables(worker), worker.recovery.pls
    worker.train(2)
    alive = whole_tables(worker)
    worker.die()
    moved = create_autospec(RowTransfer.move, side_effect=RowTransfer.move)
    loaded = create_autospec(Checkpointer.load_shards, side_effect=Checkpointer.load_shards)
    monkeypatch.setattr(RowTransfer, "move", moved)
    monkeypatch.setattr(Checkpointer, "load_shards", loaded)
    # table c was data-parallel, and so is in no segment; rows of a and b would move to other places
    again = new_worker(layout={"a": "rw", "b": "tw", "c": "tw"}, **adagrad).restore()
    assert (again.story.kind, again.story.save_step) == (kind, 5)
    assert moved.called == loaded.called == (kind == "partial")
    assert (again.story.bytes_moved > 0) == (kind == "partial")
    assert [way.name for way in again.story.ways if way.is_chosen] == [
        "checkpoint rows" if kind == "partial" else "full"
    ]
    assert [way.redone for way in again.story.ways] == [0, 2 * BATCH]
    if kind == "partial":
        (loss,) = again.story.losses
        assert (loss.num_rows, loss.samples) == (20, 2 * BATCH)
        assert loss.pls == again.story.pls_added == again.recovery.pls == pytest.approx(0.02)
        assert_same(
            whole_tables(again),
            {**alive, "ebc.embedding_bags.c": saved["ebc.embedding_bags.c"]},
        )
    else:
        assert "from 0.000000 to 0.020000, above max_pls = 0.01" in again.story.reason
        assert (again.story.step, again.recovery.pls, again.story.losses) == (5, charged, ())
        assert_same(whole_tables(again), saved)


def whole_tables(worker):
    """Weights by table, whatever the layout."""
    return whole(worker.recovery.checkpointer.shards)


def whole(shards):
    tables = {}
    for shard in shards:
        whole = tables.setdefault(shard.table_fqn, torch.zeros(shard.table_shape))
        whole[
            shard.row_offset : shard.row_offset + shard.num_rows,
            shard.col_offset : shard.col_offset + shard.num_cols,
        ] = shard.weights
    return tables


def test_a_clean_end_frees_the_memory_and_a_later_start_continues_from_the_save(new_worker, tmp_path):
    worker = new_worker(restarted=False).restore().train(7)
    values = worker.values()
    with worker.recovery:
        pass
    dist.destroy_process_group()
    assert not list((tmp_path / "memory").iterdir())
    later = new_worker(restarted=False).restore()
    assert (later.story.kind, later.story.step, later.recovery.samples_done) == ("resume", 7, 7 * BATCH)
    assert_same(later.values(), values)
    assert [each.kind for each in later.recovery.recoveries] == ["start", "resume"]


def test_close_without_a_block_is_the_normal_end(new_worker, tmp_path):
    worker = new_worker(restarted=False).restore().train(2)
    worker.recovery.close()
    worker.recovery.close()
    assert not list((tmp_path / "memory").iterdir())
    assert worker.recovery.checkpointer.newest_step == 2
    with pytest.raises(ValueError, match="is closed"):
        worker.recovery.step(BATCH)
    dist.destroy_process_group()


def leave_by_exit(recovery, code):
    with pytest.raises(SystemExit), recovery:
        sys.exit(code)


def leave_by_closing_a_generator(recovery, _):
    def steps():
        with recovery:
            yield

    generator = steps()
    next(generator)
    generator.close()


@pytest.mark.parametrize(
    ("leave", "code"),
    [(leave_by_exit, 0), (leave_by_exit, None), (leave_by_closing_a_generator, None)],
)
def test_leaving_without_an_error_is_the_normal_end_in_whatever_way(new_worker, tmp_path, leave, code):
    worker = new_worker(restarted=False).restore().train(7)
    leave(worker.recovery, code)
    dist.destroy_process_group()
    assert not list((tmp_path / "memory").iterdir())
    assert worker.recovery.checkpointer.newest_step == 7


def leave_by_a_generator_whose_caller_fails(recovery, _):
    def steps():
        with recovery:
            yield

    generator = steps()
    next(generator)
    with pytest.raises(KeyError), closing(generator):
        raise KeyError


@pytest.mark.parametrize(
    ("leave", "code"),
    [(leave_by_exit, 1), (leave_by_exit, "why"), (leave_by_a_generator_whose_caller_fails, None)],
)
def test_leaving_with_an_error_keeps_the_memory(new_worker, tmp_path, leave, code):
    worker = new_worker(restarted=False).restore().train(7)
    leave(worker.recovery, code)
    assert (worker.recovery.checkpointer.newest_step, worker.recovery.memory_folder.is_dir()) == (5, True)


def test_a_clean_exit_before_memory_was_taken_over_keeps_it(new_worker):
    worker = new_worker(restarted=False).restore().train(7)
    worker.die()
    again = new_worker()
    leave_by_exit(again.recovery, 0)
    again.die(RuntimeError())
    assert (new_worker().restore().story.step) == 7


def test_memory_of_a_run_that_was_aborted_is_not_picked_up_by_a_new_one(new_worker, tmp_path):
    worker = new_worker(restarted=False).restore().train(5).wait_for_save()
    saved = worker.values()
    worker.train(3).die()
    new = new_worker(restarted=False).restore()
    assert (new.story.kind, new.story.step) == ("resume", 5)
    assert any("of a run that is over" in refused for refused in new.story.refused)
    assert_same(new.values(), saved)
    assert len([each for each in (tmp_path / "memory").glob("*/*/*") if each.is_dir()]) == 1


def test_a_new_run_does_not_start_over_over_what_is_saved(new_worker):
    new_worker(restarted=False).restore().train(5).wait_for_save().die()
    with pytest.raises(MismatchError, match="holds save"):
        new_worker(restarted=False, resume=False).restore()


def test_a_run_that_starts_over_takes_no_other_launch_s_saves_after_a_restart_either(
    new_worker, monkeypatch, wipe
):
    monkeypatch.setenv("CPR_LAUNCH", "first")
    new_worker(restarted=False, resume=False).restore().train(5).wait_for_save().die()
    monkeypatch.setenv("CPR_LAUNCH", "second")
    for restarted in (False, True, True):
        worker = new_worker(restarted=restarted, resume=False)
        with pytest.raises(MismatchError, match="holds save 0, which this run has not loaded"):
            worker.restore()
        worker.die()
    monkeypatch.setenv("CPR_LAUNCH", "first")
    wipe()
    again = new_worker(resume=False).restore()
    assert (again.story.kind, again.story.step) == ("full", 5)


def test_a_run_without_progress_stops_with_a_report(new_worker):
    new_worker(restarted=False, policy=None).restore().train(2).die(RuntimeError("first"))
    policy = cpr.RecoveryPolicy(max_generations_without_progress=2)
    new_worker(policy=policy).restore().die(RuntimeError("second"))
    new_worker(policy=policy).restore().die(RuntimeError("third"))
    fourth = new_worker(policy=policy)
    with pytest.raises(NoProgressError, match=r"2 generations .* without finishing step 3") as report:
        fourth.restore()
    assert all(f"generation {number} ended: rank 0" in str(report.value) for number in (1, 2))
    assert "second" in str(report.value)
    assert "third" in str(report.value)
    assert "first" not in str(report.value)  # that generation had finished a step
    told = [report.value]
    fourth.die(report.value)
    for _ in range(2):
        again = new_worker(policy=policy)
        with pytest.raises(RunStoppedError, match="2 generations") as report:
            again.restore()
        told.append(report.value)
        again.die(report.value)
    assert str(told[1]) == str(told[2]), "told again in short, not nested"
    assert "second" not in str(told[1])
    assert all(str(each).count("Restarts cannot help: stop the launcher") == 1 for each in told)


@pytest.mark.parametrize("end", ["told", "killed"])
def test_a_run_whose_values_are_not_finite_does_not_continue_however_often_it_is_restarted(new_worker, end):
    worker = new_worker(restarted=False).restore().train(5).wait_for_save()
    worker.train(2).die(FloatingPointError("the loss is nan"))
    for _ in range(2):
        again = new_worker()
        with pytest.raises(RunStoppedError, match=r"loss is nan\. .* from save 0, step 5$") as refused:
            again.restore()
        again.die(refused.value if end == "told" else None)
    later = new_worker(restarted=False).restore()
    assert (later.story.kind, later.story.step) == ("resume", 5)


def test_a_run_that_diverged_before_its_first_save_is_not_restarted_from_the_beginning_either(new_worker):
    new_worker(restarted=False).restore().train(2).die(FloatingPointError("the loss is nan"))
    with pytest.raises(RunStoppedError, match="begin a new run"):
        new_worker().restore()


def test_what_is_refused_before_a_save_is_not_saved(new_worker):
    refused = []

    def check():
        if refused:
            raise FloatingPointError("a parameter is nan")

    worker = new_worker(restarted=False, before_save=check).restore().train(9).wait_for_save()
    refused.append(True)
    for save in (lambda: worker.train(1), worker.recovery.save_now, worker.recovery.close):
        with pytest.raises(FloatingPointError, match="a parameter is nan"):
            save()
    assert worker.recovery.checkpointer.newest_step == 5


def test_killed_during_a_save_the_one_before_counts_and_the_next_is_whole(new_worker, tmp_path):
    new_worker(restarted=False).restore().train(9).wait_for_save().die()
    half = tmp_path / "checkpoint" / "saves" / "00000001-1" / "ebc.embedding_bags.a"
    half.mkdir(parents=True)
    (half / "r0-c0.arrow").write_bytes(b"half a fi")
    again = new_worker().restore()
    assert (again.story.kind, again.recovery.steps_done) == ("process", 9)
    assert again.recovery.checkpointer.newest_step == 5
    assert not half.exists()
    again.train(1).wait_for_save()
    assert again.recovery.checkpointer.newest_step == 10


def fail(*_):
    raise OSError(28, "No space left on device")


def test_a_worker_whose_directory_a_newer_run_owns_does_not_try_again(new_worker):
    worker = new_worker(restarted=False).restore().train(1)
    lock = worker.recovery.checkpointer.ownership.lock
    write_owner(lock._storage, replace(lock._own, epoch=lock.epoch + 1, token="ff"))
    with pytest.raises(SaveRefusedError, match="no longer belongs to run"):
        worker.train(5000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint": ""}, "no checkpoint directory"),
        ({"save_every_steps": -1}, "save_every_steps is -1"),
        ({"moment": "soon"}, "choose one of consistent, rolling"),
        ({"total_samples": 0}, "total_samples is 0"),
        ({"save_every_steps": cpr.IntervalRule(mean_time_to_failure_s=3600.0)}, "needs total_samples"),
        ({"save_every_steps": cpr.IntervalRule(), "total_samples": 8}, "give mean_time_to_failure_s"),
        ({"policy": cpr.RecoveryPolicy(max_pls=0.1)}, "total_samples"),
        ({"resident_root": "/nowhere"}, "CPR_RESIDENT_ROOT"),
    ],
)
def test_bad_options_are_refused_at_once(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        cpr.PartialRecovery(**{"checkpoint": str(tmp_path), "resident_root": str(tmp_path), **options})


def test_calls_in_the_wrong_order_say_what_is_missing(tmp_path):
    recovery = cpr.PartialRecovery(str(tmp_path / "checkpoint"), resident_root=str(tmp_path))
    with pytest.raises(ValueError, match="init_process_group"), recovery.building():
        pass
    with pytest.raises(ValueError, match="init_process_group"):
        recovery.restore(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="restore"):
        recovery.step(1)
    recovery.init_process_group("gloo")
    with pytest.raises(ValueError, match=r"recovery\.building"):
        recovery.restore(torch.nn.Linear(1, 1))
    recovery.close()
    dist.destroy_process_group()


def test_lost_rows_whose_save_is_damaged_mean_full_recovery_from_an_older_one(
    new_worker, tmp_path, monkeypatch
):
    worker = new_worker(restarted=False).restore().train(5).wait_for_save()
    older = worker.values()
    worker.train(5).wait_for_save().train(1).die()
    (newest,) = (tmp_path / "checkpoint").glob("saves/00000001-1/ebc.embedding_bags.a/*.arrow")
    newest.write_bytes(b"\0" * newest.stat().st_size)
    shutil.rmtree(next(each for each in (tmp_path / "memory").glob("*/*/*") if each.is_dir()))
    again = new_worker().restore()
    assert (again.story.kind, again.story.step, again.story.save_step) == ("full", 5, 5)
    assert_same(again.values(), older)


def test_what_saves_and_failures_cost_is_written_with_the_saves(new_worker, tmp_path):
    worker = new_worker(restarted=False).restore().train(6).wait_for_save().train(1)
    worker.die()
    again = new_worker().restore().train(1)
    assert [failure.kind for failure in again.recovery.history.failures] == ["process"]
    again.recovery.close()
    dist.destroy_process_group()
    history = read_history(open_storage(str(tmp_path / "checkpoint")))
    assert [(save.step, save.kind) for save in history.saves] == [(5, "base"), (8, "base")]
    assert history.failures[0].seconds.keys() >= {"imports", "build", "restore", "first_step"}
    assert (history.steps_done, history.samples_done, history.samples_total) == (8, 8 * BATCH, 100 * BATCH)


def test_an_interval_that_is_chosen_by_what_saves_cost(new_worker, caplog):
    caplog.set_level("INFO")
    rule = cpr.IntervalRule(target_pls=0.1, mean_time_to_failure_s=3600.0, max_overhead=0.5)
    worker = new_worker(restarted=False, save_every_steps=rule).restore().train(9)
    assert worker.recovery.checkpointer.newest_step is None
    worker.train(1).wait_for_save()
    assert worker.recovery.checkpointer.newest_step == FIRST_STEPS == 10
    for _ in range(100):  # a save costs next to nothing here: the storage sets the pace
        worker.train(5).wait_for_save()
        if worker.recovery.checkpointer.newest_step > 10:
            break
    assert worker.recovery.checkpointer.newest_step > 10
    assert re.search(r"a save each .*: .* steps from save to save", caplog.text)


@pytest.mark.parametrize("moment", ["rolling", "consistent"])
def test_an_end_at_the_step_of_a_periodic_save_is_saved_once(new_worker, moment):
    worker = new_worker(restarted=False, moment=moment).restore().train(5)
    values = worker.values()
    worker.recovery.close()
    dist.destroy_process_group()
    later = new_worker(restarted=False).restore()
    assert later.recovery.checkpointer.newest_state().sequence == 0
    assert_same(later.values(), values)


def full(*_):
    raise NotEnoughMemoryError("5 MB of shared memory are needed: enlarge it")


def test_no_room_for_mirrors_stops_a_new_run_and_not_one_that_has_begun(new_worker, monkeypatch, caplog):
    new_worker(restarted=False).restore().train(3).die()
    monkeypatch.setattr("cpr.session.start_mirror", full)
    assert new_worker().restore().train(1).recovery.steps_done == 4
    assert "training continues without mirrors: 5 MB" in caplog.text


def test_the_package_gives_its_public_names_and_is_cheap_to_import(monkeypatch):
    code = "import sys, cpr; print(cpr.__version__, {'torch', 'torchrec', 'pyarrow'} & set(sys.modules))"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output == f"{cpr.__version__} set()\n"
    assert all(getattr(cpr, name) for name in cpr.__all__)
    assert cpr.Checkpointer is Checkpointer
    with monkeypatch.context() as not_installed:
        not_installed.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
        assert cpr.__version__ == "0+unknown"
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        cpr.Nonsense  # noqa: B018
