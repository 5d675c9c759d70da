"""Conclusions from what workers report."""

from dataclasses import replace

from cpr.extent import Extent
from cpr.recovery.decide.assessment import (
    MirrorMoment,
    SegmentReport,
    ShardReport,
    Slot,
    WorkerReport,
    assess,
)
from cpr.recovery.decide.lineage import Directory, SavedState
from cpr.recovery.run.report import KILLED, MEMORY_GONE

FLOATS = (("sum", "float32", 1), ("weights", "float32", 2))


def shard(rank, rows=10, columns=FLOATS):
    place = Extent(
        table_fqn=f"t{rank}", table_shape=(rows, 8), row_offset=0, num_rows=rows, col_offset=0, num_cols=8
    )
    return ShardReport(extent=place, columns=columns, bytes_per_row=36)


def segment(
    old_rank,
    *,
    step=7,
    slot=7,
    begun=-1,
    generation=0,
    slot_generation=0,
    went_back=-1,
    told=0,
    world_size=2,
    **options,
):
    return SegmentReport(
        **{
            "old_rank": old_rank,
            "old_world_size": world_size,
            "generation": generation,
            "epoch": 1,
            "step_finished": step,
            "update_begun": begun,
            "pid": 100 + old_rank,
            "left_ns": -1,
            "heartbeat_ns": 5,
            "reason": "",
            "shards": (shard(old_rank),),
            "whole_bytes": 360,
            "slot": slot
            if slot is None or isinstance(slot, Slot)
            else Slot(went_back=went_back, generation=slot_generation, step=slot, num_recoveries=told),
            **options,
        }
    )


def assess_all(reports):
    return assess(reports, Directory())


def worker(rank, *segments, adopted=True, shards=None):
    return WorkerReport(
        rank=rank,
        host="here",
        pid=rank,
        segments=segments,
        shards=(shard(rank),) if shards is None else shards,
        adopted=adopted and bool(segments),
    )


def test_the_furthest_replica_counts_and_the_lowest_rank_has_it():
    found = assess_all([worker(0, segment(0, slot=6, step=6)), worker(1, segment(1)), worker(2, segment(2))])
    assert (found.slot.step, found.slot_of) == (7, (1, 0))
    assert [need.adopted for need in found.needed] == [True, True, True]


def test_a_slot_may_be_ahead_of_the_mark_that_follows_it():
    found = assess_all([worker(0, segment(0, step=6, slot=7)), worker(1, segment(1, step=6, slot=6))])
    assert found.slot.step == 7
    assert len(found.held) == 2


def test_memory_that_was_left_behind_is_lost_and_said_to_be():
    found = assess_all([worker(0, segment(0)), worker(1, segment(1, step=5, slot=5))])
    assert [need.adopted for need in found.needed] == [True, False]
    assert found.lost == {1: 1.0}
    assert any("left behind at step 5" in refused for refused in found.refused)


def test_a_later_generation_counts_more_than_a_later_step():
    stale = segment(0, step=10, slot=10)
    newer = {"step": 9, "slot": 9, "generation": 1, "slot_generation": 1}
    found = assess_all([worker(0, segment(0, **newer), stale), worker(1, segment(1, **newer))])
    assert (found.slot.generation, found.slot.step, found.slot_of) == (1, 9, (0, 0))


def test_of_one_generation_and_step_the_state_that_knows_its_own_recovery_counts():
    found = assess_all([worker(0, segment(0, told=1)), worker(1, segment(1, told=2))])
    assert (found.slot_of, found.slot.num_recoveries) == ((1, 0), 2)


def test_memory_that_others_have_trained_without_is_lost_though_it_is_one_step_behind():
    trained = {"generation": 1, "slot": Slot(generation=1, step=7, progress_generation=1), "step": 7}
    found = assess_all([worker(0, segment(0, **trained)), worker(1, segment(1, step=6, slot=6))])
    assert list(found.lost) == [1]
    assert "left behind at step 6" in found.refused[0]
    killed = {**trained, "slot": Slot(generation=1, step=7, progress_generation=0)}  # before they trained
    assert not assess_all([worker(0, segment(0, **killed)), worker(1, segment(1, step=6, slot=6))]).lost


def test_memory_whose_rows_were_replaced_by_those_of_a_save_does_not_come_back():
    """Or the portion of lost samples would count what is not lost."""
    slot = Slot(generation=1, step=7, losses=((2, 1, 1),))
    partial = {"generation": 1, "slot": slot}
    found = assess_all([worker(0, segment(0, **partial)), worker(1, segment(1))])
    assert list(found.lost) == [1]
    assert "replaced by rows of a save" in found.refused[0]
    assert not assess_all([worker(0, segment(0, **partial)), worker(1, segment(1, **partial))]).lost


def mirror(old_rank, **options):
    return segment(old_rank, slot=None, is_mirror=True, **{"samples": 70, **options})


def test_a_mirror_stands_for_a_worker_whose_memory_is_gone():
    found = assess_all([worker(0, segment(0), mirror(0, step=6), mirror(1, step=4, samples=40)), worker(1)])
    assert found.lost == {1: 1.0}
    assert found.mirrored == {1: MirrorMoment(step=4, samples=40)}
    assert [(held.extent.table_fqn, held.step, held.is_mirror) for held in found.held] == [
        ("t0", 7, False),
        ("t1", 4, True),
    ]
    assert found.missing == [1], "its rows of step 7 are nowhere"
    assert not found.interrupted
    newest = assess_all([worker(0, segment(0), mirror(1, step=6), mirror(1, step=7)), worker(1)])
    assert newest.mirrored == {1: MirrorMoment(step=7, samples=70)}
    assert newest.missing == []


def test_a_mirror_of_rows_that_ended_with_their_worker_does_not_stand_for_its_other_states():
    """Of tables on a GPU: inherited from memory and from the mirror, they would count twice."""
    gpu = {"shards": (), "whole_bytes": 360}
    found = assess_all([worker(0, segment(0, **gpu), mirror(1)), worker(1, segment(1, **gpu), mirror(0))])
    assert (found.lost, found.missing) == ({0: 1.0, 1: 1.0}, [])
    assert (found.mirrored.keys(), found.remembered) == ({0, 1}, {0, 1})
    behind = assess_all([worker(0, segment(0), mirror(1)), worker(1, segment(1, step=6, slot=6, **gpu))])
    assert (behind.mirrored.keys(), behind.remembered) == ({1}, {0})


def test_a_mirror_of_some_rows_is_no_whole_copy():
    some = (replace(shard(1), is_chosen=True), shard(2))
    found = assess_all([worker(0, segment(0), mirror(1, shards=some, share=0.3)), worker(1)])
    assert found.mirrored == {1: MirrorMoment(step=7, samples=70, share=0.3)}
    assert found.missing == [1]
    assert [held.extent.table_fqn for held in found.held] == ["t0", "t2"]
    assert [(held.extent.table_fqn, held.index) for held in found.chosen] == [("t1", 1)]


def test_a_mirror_that_is_ahead_shows_that_the_next_step_was_interrupted():
    assert assess_all([worker(0, segment(0), mirror(1, step=8)), worker(1)]).interrupted


def test_memory_and_mirrors_are_brought_to_the_newest_step_that_all_have():
    """The batch that was interrupted counts as nothing then, and no mirror is behind."""
    survivors = [segment(0, begun=8, steps=(7, 6, 5)), segment(1, step=6, slot=6, begun=7, steps=(6, 5))]
    kept = mirror(2, step=8, steps=(8, 6, 4), world_size=3)
    survivors = [replace(each, old_world_size=3) for each in survivors]
    reports = [worker(0, survivors[0], kept), worker(1, survivors[1]), worker(2)]
    found = assess_all(reports)
    assert (found.common_step, found.slot.step, found.slot_of) == (6, 6, (0, 0))
    assert found.brought_to == {(0, 0): 6, (0, 1): 6, (1, 0): 6}
    assert {held.step for held in found.held} == {6}
    assert (found.interrupted, found.missing, found.mirrored[2].step) == (False, [], 6)

    saved = Directory(newest=SavedState(sequence=0, step=7, base_step=7, epoch=1), session_id="s")
    assert assess(reports, saved).common_step is None, "what is saved is of the future"
    others = {
        "no mirror": [worker(0, survivors[0]), worker(1, survivors[1]), worker(2)],
        "a mirror of steps before": [worker(0, survivors[0], replace(kept, steps=(4,))), *reports[1:]],
        "damaged": [worker(0, survivors[0], replace(kept, problem="damaged")), *reports[1:]],
        "of an older generation": [
            worker(0, replace(survivors[0], slot=Slot(generation=1, step=7, progress_generation=1)), kept),
            *reports[1:],
        ],
        "only mirrors": [worker(0, *(mirror(rank, steps=(7,)) for rank in (0, 1))), worker(1)],
    }
    for what, reports in others.items():
        found = assess_all(reports)
        assert found.common_step is None, what
        assert set(found.brought_to.values()) <= {8, 7}, "mirrors to their newest moments"


def test_mirrors_that_others_have_trained_without_or_that_are_damaged_do_not_count():
    trained = {"generation": 1, "slot": Slot(generation=1, step=9, progress_generation=1), "step": 9}
    found = assess_all([worker(0, segment(0, **trained), mirror(1, step=8)), worker(1)])
    assert (found.mirrored, list(found.lost)) == ({}, [1])
    assert "the mirror of old rank 1 on here: left behind at step 8" in found.refused[0]
    went_back = Slot(generation=1, step=3, went_back=1)
    back = {"generation": 1, "slot": went_back, "step": 3}
    assert not assess_all([worker(0, segment(0, **back), mirror(1)), worker(1)]).mirrored
    replaced = {"generation": 1, "slot": Slot(generation=1, step=7, losses=((2, 1, 1),))}
    assert not assess_all([worker(0, segment(0, **replaced), mirror(1)), worker(1)]).mirrored
    damaged = mirror(1, problem="it differs from its digest")  # other shards of it may be readable
    found = assess_all([worker(0, segment(0), damaged), worker(1)])
    assert not found.mirrored
    assert "it differs from its digest" in found.refused[0]


def test_a_mirror_older_than_the_newest_save_is_not_used():
    directory = Directory(newest=SavedState(sequence=3, epoch=1, step=6, base_step=6))
    found = assess([worker(0, segment(0), mirror(1, step=5)), worker(1)], directory)
    assert not found.mirrored
    assert "save 3 of step 6 (epoch 1) was made after it" in found.refused[0]


def test_memory_of_before_all_workers_went_back_does_not_count():
    """One worker had finished going back when all died; another one's old memory was not yet dropped.

    What the generation that went back wrote there before it knew that is of that generation, too.
    """
    back = segment(0, step=5, slot=5, generation=1, slot_generation=1, went_back=1)
    stale = segment(1, step=10, slot=10, generation=0, slot_generation=1, counters={"t": {"iter": 10}})
    found = assess_all([worker(0, back), worker(1, stale)])
    assert (found.slot.step, found.slot_of) == (5, (0, 0))
    assert [(held.rank, held.generation) for held in found.held] == [(0, 1)]
    assert [need.adopted for need in found.needed] == [True, False]
    assert (found.lost, found.counters, found.interrupted) == ({1: 1.0}, {}, False)
    assert any("of before all workers went back in generation 1" in refused for refused in found.refused)


def test_an_update_that_was_begun_interrupts_unless_it_is_accounted_for():
    def interrupted(**options):
        return assess_all([worker(0, segment(0)), worker(1, segment(1, **options))]).interrupted

    assert interrupted(begun=8)
    assert not interrupted(begun=7)  # it finished elsewhere: its replica is there
    later = assess_all([worker(0, segment(0, slot_generation=1)), worker(1, segment(1, begun=8))])
    assert not later.interrupted


def test_who_lost_what_and_how_they_ended():
    found = assess_all(
        [
            worker(0, segment(0, world_size=3, reason="ValueError: x", left_ns=9)),
            worker(1, segment(2, world_size=3, whole_bytes=480, problem="page 3 is torn")),
            worker(2),
        ]
    )
    assert found.lost == {1: 1.0, 2: 0.25}
    endings = {each.rank: each.why for each in found.endings}
    assert endings == {0: "ValueError: x", 1: MEMORY_GONE, 2: KILLED}
    assert found.endings[-1].rank == 0  # those without a word come first
    assert any("page 3 is torn" in refused for refused in found.refused)


def test_segments_of_one_worker_are_numbered_through():
    found = assess_all([worker(0, segment(0), segment(1))])
    assert [(held.index, held.extent.table_fqn) for held in found.held] == [(0, "t0"), (1, "t1")]
    assert [need.adopted for need in found.needed] == [True]


def test_what_lies_on_a_gpu_is_moved_and_not_adopted():
    on_gpu = ShardReport(extent=shard(0).extent, columns=FLOATS, bytes_per_row=36, in_segment=False)
    (needed,) = assess_all([worker(0, segment(0), shards=(on_gpu,))]).needed
    assert not needed.adopted


def test_another_model_is_objected_to():
    wide = shard(0, columns=(*FLOATS, ("exp_avg", "float32", 2)))
    found = assess_all([worker(0, segment(0), shards=(wide,))])
    assert "table t0 is 10 x 8" in found.mismatch
    assert "no table t0" in assess_all([worker(0, segment(0), shards=(shard(5),))]).mismatch
    assert assess_all([worker(0, segment(0))]).mismatch is None


def test_counters_are_those_of_the_newest_step():
    found = assess_all(
        [
            worker(0, segment(0, counters={"t": {"iter": 7}})),
            worker(1, segment(1, step=6, slot=6, counters={"t": {"iter": 6}, "u": {"iter": 6}})),
        ]
    )
    assert found.counters == {"t": {"iter": 7}, "u": {"iter": 6}}
