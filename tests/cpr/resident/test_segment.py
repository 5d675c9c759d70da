"""What is sealed can be read back by who has no model; what is not sealed does not count."""

from dataclasses import replace

import pytest
import torch

from cpr.resident.folders import forget_unsaved
from cpr.resident.segment import Segment
from tests.cpr.resident.shards import COLS, ROWS, RUN, assert_same, crash_and_find, make_shard


def test_shards_are_found_in_the_middle_of_regions(home):
    segment = home.create("rank1")
    region = segment.region("all", torch.float16, 1000)
    region.copy_(torch.arange(1000))
    whole = make_shard()
    shards = [
        replace(whole, weights=region[64:144].view(10, 8), optimizer_state={"sum": region[144:154]}),
        replace(whole, row_offset=0, weights=region[320:330].view(5, 2), optimizer_state={}),
    ]
    assert segment.seal(**RUN, shards=shards) == []
    found = crash_and_find(home, segment)
    assert_same(shards, found.held_shards())
    layout = found.layout
    assert (layout.session_id, layout.rank, layout.world_size, layout.generation) == ("session", 1, 2, 3)


def test_what_lies_elsewhere_is_named_and_left_out(home):
    segment = home.create("rank1")
    here, elsewhere = make_shard(segment), make_shard(fqn="model.gpu")
    copied_anyway = replace(make_shard(fqn="model.dp"), replicated=True)
    assert segment.seal(**RUN, shards=[here, elsewhere, copied_anyway]) == [elsewhere.name]
    assert_same([here], segment.held_shards())


def test_live_tables_are_mapped_and_not_read(home, monkeypatch):
    """A restart would take longer the larger they are."""
    segment = home.create("rank1")
    shard = make_shard(segment)
    segment.seal(**RUN, shards=[shard])

    def digest(region):
        raise AssertionError("read")

    monkeypatch.setattr("cpr.resident.segment.digest", digest)
    assert_same([shard], crash_and_find(home, segment).held_shards())


def test_sealing_again_forgets_and_frees_what_was_before(home):
    segment = home.create("rank1")
    segment.seal(**RUN, shards=[make_shard(segment, fqn="model.old")])
    segment.begin_build()
    assert len(list(segment.folder.glob("*.memory"))) == 3  # still what counts
    shard = make_shard(segment, fqn="model.new")
    segment.seal(**RUN, shards=[shard])
    assert len(list(segment.folder.glob("*.memory"))) == 3
    assert_same([shard], segment.held_shards())


@pytest.mark.parametrize("name", ["", "../a", ".a", "a/b"])
def test_regions_stay_in_their_folder(home, name):
    with pytest.raises(ValueError, match="no name for a region"):
        home.create("rank1").region(name, torch.int32, 1)


def test_what_is_set_aside_is_free_and_the_sealed_content_stays(home):
    segment = home.create("rank1")
    shard = make_shard(segment, fill=5.0)
    segment.seal(**RUN, shards=[shard])
    segment.set_aside("model.t-weights", "new").zero_()
    assert (shard.weights == 0).all()
    (held,) = Segment(segment.folder).held_shards()
    assert (held.columns["weights"] == torch.full((ROWS, COLS), 5.0)).all()


def test_companions_are_sealed_with_the_tables_and_taken_over_with_them(home):
    segment = home.create("rank1")
    segment.begin_build()
    counts, was_there = segment.companion("counts", torch.int32, 10, adopt=True)
    assert (was_there, counts.tolist()) == (False, [0] * 10)
    segment.seal(**RUN, shards=[make_shard(segment)])
    counts += 7
    found = crash_and_find(home, segment)
    found.begin_build()
    again, was_there = found.companion("counts", torch.int32, 10, adopt=True)
    assert (was_there, again.tolist()) == (True, [7] * 10)
    assert not found.companion("of another tracker", torch.int32, 10, adopt=True)[1]
    found.seal(**RUN, shards=[make_shard(found)])
    assert sorted(found.layout.companions) == ["counts", "of another tracker"]


@pytest.mark.parametrize(("numel", "adopt"), [(10, False), (11, True)])
def test_a_companion_of_other_tables_is_new_and_the_sealed_one_stays_as_it_was(home, numel, adopt):
    segment = home.create("rank1")
    segment.companion("counts", torch.int32, 10, adopt=True)[0].fill_(7)
    segment.seal(**RUN, shards=[make_shard(segment)])
    found = crash_and_find(home, segment)
    found.begin_build()
    counts, was_there = found.companion("counts", torch.int32, numel, adopt=adopt)
    assert (was_there, counts.tolist()) == (False, [0] * numel)
    counts += 1
    found = crash_and_find(home, found)  # before it was sealed
    found.begin_build()
    assert found.companion("counts", torch.int32, 10, adopt=True)[0].tolist() == [7] * 10


@pytest.mark.parametrize(
    ("marked_at", "newest", "is_kept"), [(None, 0, False), (80, 80, True), (80, 60, True), (80, 81, False)]
)
def test_unsaved_memory_is_forgotten_only_when_a_later_step_is_saved(home, marked_at, newest, is_kept):
    """Not when the save that was the newest is lost: then this memory is needed all the more."""
    segment = home.create("rank0")
    segment.mark_unsaved(marked_at)
    forget_unsaved(home.folder, newest)
    assert segment.is_unsaved == is_kept
    segment.mark_unsaved(marked_at)
    forget_unsaved(home.folder)
    assert not segment.is_unsaved
