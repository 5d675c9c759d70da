"""Which ways are open, and what brings their rows into place."""

from types import SimpleNamespace

import pytest

from cpr.checkpoint.collectives import Alone
from cpr.estimator.history import RunHistory, write_history
from cpr.recovery.decide.assessment import Assessment, Decision, MirrorMoment, Slot
from cpr.recovery.restore.pls_budget import PlsBudget
from cpr.recovery.restore.transfer import plan_sources
from cpr.recovery.restore.ways import USUAL_BYTES_PER_S, Rates, Ways, seconds_per_sample, slowest_rate
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery
from tests.cpr.checkpoint.saves import MemoryStorage
from tests.cpr.recovery.restore.test_transfer import DIM, held, needed

ROW_BYTES = 4 * (DIM + 1)
RATES = {"load_bytes_per_s": 2.0 * ROW_BYTES, "move_bytes_per_s": 4.0 * ROW_BYTES}


def found_ways(*, lost, mirrored, saved=True):
    """Of a table on two ranks, after three steps of 100 samples, the first of which is saved."""
    progress = RunProgress()
    for _ in range(3):
        progress.step(100)
        if not progress.saves:
            progress.note_save()
    progress.recoveries = [Recovery(kind="partial", reason="", generation=0, step=0, **RATES)]
    then = RunProgress()
    then.step(100)
    then.note_save()
    checkpointer = SimpleNamespace(
        newest_state=lambda: SimpleNamespace(step=1, newest=SimpleNamespace(world_size=2)),
        registered_in=lambda *_: then.state_dict(),
    )
    parts = [held((0, 20)), *([] if lost else [held((20, 40), rank=1)])]
    if mirrored:
        parts.append(held((20, 40), index=1, is_mirror=True))
    found = Assessment(
        slot=Slot(generation=0, step=3),
        slot_of=(0, 0),
        interrupted=False,
        held=tuple(parts),
        needed=(needed((0, 20)), needed((20, 40), rank=1)),
        lost={1: 1.0} if lost else {},
        old_world_size=2,
        mirrored={1: MirrorMoment(step=2, samples=200)} if mirrored else {},
    )
    kind = "process" if not lost else "mirror" if mirrored else "partial"
    budget = PlsBudget(checkpointer, Alone(), progress, total_samples=1000)
    plan = plan_sources(found.needed, found.held)
    return Ways(budget, progress).find(Decision(kind, ""), found, plan, 1 if saved else None)


def test_a_lost_node_is_recovered_from_its_mirror_from_the_checkpoint_or_by_going_back():
    ways = found_ways(lost=True, mirrored=True)
    assert [each.way.name for each in ways] == ["mirror", "checkpoint rows", "full"]
    assert [each.decision.kind for each in ways] == ["mirror", "partial", "full"]
    assert [each.way.lost for each in ways] == [50, 100, 0]  # one of two nodes, one or two steps behind
    assert [each.way.redone for each in ways] == [0, 0, 200]
    assert [each.way.pls for each in ways] == pytest.approx([0.05, 0.1, 0.0])
    assert [each.way.lost_share for each in ways] == [0, 0.5, 0]
    # 20 rows of each rank move at 4 rows a second, or come from the checkpoint at 2
    assert [each.way.rows_s for each in ways] == pytest.approx([5, 10, 10])
    mirror, rows, _ = ways
    assert any(each.mirrored_rows for each in mirror.plan)
    assert not rows.found.mirrored
    assert sum(each.lost_rows for each in rows.plan) == 20


def test_without_a_mirror_or_a_save_there_are_fewer_ways():
    assert [each.way.name for each in found_ways(lost=True, mirrored=False)] == ["checkpoint rows", "full"]
    assert [each.way.name for each in found_ways(lost=False, mirrored=False)] == ["in place"]
    mirror, full = found_ways(lost=True, mirrored=True, saved=False)
    assert mirror.way.name == "mirror"
    assert (full.way.redone, full.way.rows_s, full.way.pls) == (300, 0.0, 0.0)


def test_rates_are_those_of_the_newest_recovery_that_knows_them():
    stories = [
        Recovery(kind="partial", reason="", generation=number, step=0, load_bytes_per_s=rate)
        for number, rate in enumerate([5.0, 7.0, None])
    ]
    assert Rates.measured(stories) == Rates(load=7.0, move=USUAL_BYTES_PER_S)
    assert slowest_rate({0: 4 * 10**6, 1: 10**6, 2: 10, 3: 10**9}, [2.0, 1.0, 9.0, 0.0]) == 10**6
    assert slowest_rate({0: 10}, [1.0]) is None


def test_the_time_of_a_sample_comes_from_the_history_if_that_can_be_read():
    storage = MemoryStorage()
    assert seconds_per_sample(Alone(), storage) is None
    measured = RunHistory(
        world_size=2, nodes=2, step_s=0.5, steps_done=10, samples_done=1000, samples_total=None, elapsed_s=9.0
    )
    write_history(storage, measured)
    assert seconds_per_sample(Alone(), storage) == pytest.approx(0.005)
    storage.files["history.json"] = b"not a history"
    assert seconds_per_sample(Alone(), storage) is None
