import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.meeting.offers import HeldSegment, Offer, decide


def segment(session="a", rank=0, world_size=4, step=10, generation=0):
    return HeldSegment(
        session_id=session, rank=rank, world_size=world_size, step_finished=step, generation=generation
    )


def offer(*held, restarted=True):
    return Offer(restarted=restarted, host="h", pid=1, held=held)


segments = st.builds(
    segment,
    session=st.sampled_from("abc"),
    rank=st.integers(0, 5),
    world_size=st.sampled_from([3, 4]),
    step=st.integers(-1, 20),
    generation=st.integers(0, 5),
)
offers = st.builds(
    lambda held, restarted: offer(*held, restarted=restarted), st.lists(segments, max_size=3), st.booleans()
)
worlds = st.lists(offers, min_size=1, max_size=6)


@given(worlds)
def test_everybody_gets_a_rank_of_its_own(world):
    assert sorted(decide(world).ranks) == list(range(len(world)))


@given(worlds)
def test_the_session_that_got_furthest_goes_on_in_a_new_generation(world):
    decision = decide(world)
    held = [each for one in world for each in one.held]
    if not any(one.restarted for one in world):
        assert not decision.continues
    if not any(one.restarted for one in world) or not held:
        assert decision.generation == 0
        assert decision.session_id not in "abc"
        assert decision.ranks == tuple(range(len(world)))
        return
    assert decision.continues
    of_it = [each for each in held if each.session_id == decision.session_id]
    assert max(each.step_finished for each in of_it) == max(each.step_finished for each in held)
    assert decision.generation > max(each.generation for each in of_it)


@given(worlds)
def test_the_first_who_holds_a_rank_keeps_it(world):
    decision = decide(world)
    firsts = [one.held[0] if one.held else None for one in world]
    fits = [
        each.rank
        if each
        and each.session_id == decision.session_id
        and each.world_size == len(world)
        and each.rank < len(world)
        else None
        for each in firsts
    ]
    for rank in set(fits) - {None}:
        assert decision.ranks[fits.index(rank)] == rank


@given(worlds)
def test_who_keeps_nothing_fills_the_gaps_in_the_launchers_order(world):
    decision = decide(world)
    strangers = [
        rank
        for one, rank in zip(world, decision.ranks, strict=True)
        if not any(each.session_id == decision.session_id for each in one.held)
    ]
    assert strangers == sorted(strangers)


@given(offers)
def test_an_offer_survives_the_way(each):
    assert Offer.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_ranks_stay_when_the_launcher_turns_nodes_around():
    # nodes of two workers each; the first was replaced, and the launcher now counts the other one first
    world = [offer(segment(rank=2)), offer(segment(rank=3)), offer(), offer()]
    assert decide(world).ranks == (2, 3, 0, 1)


def test_a_second_segment_counts_when_the_first_is_kept_by_another():
    world = [offer(segment(rank=0)), offer(segment(rank=0), segment(rank=2)), offer(), offer()]
    assert decide(world).ranks == (0, 2, 1, 3)


def test_a_second_segment_does_not_push_away_a_first_one():
    world = [
        offer(segment(rank=0)),
        offer(segment(rank=0), segment(rank=2)),
        offer(segment(rank=2)),
        offer(),
    ]
    assert decide(world).ranks == (0, 1, 2, 3)


def test_at_another_world_size_nobody_keeps_a_rank_and_the_session_goes_on():
    world = [offer(segment(rank=3)), offer(segment(rank=1))]
    decision = decide(world)
    assert (decision.ranks, decision.session_id, decision.generation) == ((0, 1), "a", 1)


def test_memory_of_an_earlier_launch_is_nobodys():
    decision = decide([offer(segment(rank=1), restarted=False), offer(segment(rank=0), restarted=False)])
    assert decision.ranks == (0, 1)
    assert decision.session_id != "a"
    assert not decision.continues


@pytest.mark.parametrize("broken", [{}, {"held": [{"rank": 1}]}, {"held": 3}, {"held": [], "more": 1}])
def test_what_is_no_offer_is_refused(broken):
    with pytest.raises((KeyError, TypeError)):
        Offer.from_json(broken)
