"""Pareto: the choice between short steps and much energy."""

from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.controllers.pareto import RATIOS, Pareto, Point, knee, pareto_set
from tests.dlrm.comm.controllers.groups import Alone, together
from tests.dlrm.comm.controllers.playing import NUM_VALUES, Play, even, slow_link, uneven

SAMPLE, REST = 5, 20
EXPLORING = 6 * SAMPLE

points = st.lists(
    st.builds(
        Point,
        ratio=st.floats(0.001, 1),
        seconds=st.sampled_from([0.1, 0.2, 0.5, 1.0, 1.1]) | st.floats(0.01, 10),
        gain=st.sampled_from([0.1, 0.5, 0.9, 1.0]) | st.floats(0.01, 1),
    ),
    min_size=1,
    max_size=8,
)


def make(agree=None, **changes):
    return Pareto(**{"agree": agree or Alone(), "sample_steps": SAMPLE, "rest_steps": REST, **changes})


@given(points)
def test_the_pareto_set_holds_the_unbeaten_points(points):
    front = pareto_set(points)
    assert front
    for point in points:
        beaten = any(
            (other.seconds <= point.seconds and other.gain > point.gain)
            or (other.seconds < point.seconds and other.gain >= point.gain)
            for other in points
        )
        assert (point in front) == (not beaten)


@given(points, st.floats(0.1, 10))
def test_the_knee_is_in_the_set_and_does_not_depend_on_units(points, unit):
    chosen = knee(points)
    assert chosen in pareto_set(points)

    def cost(point):
        return point.seconds**0.6 / point.gain**0.4

    assert cost(chosen) <= 1.011 * min(map(cost, points))
    rescaled = knee([Point(ratio=p.ratio, seconds=p.seconds * unit, gain=p.gain) for p in points])
    assert cost(Point(ratio=1, seconds=rescaled.seconds / unit, gain=rescaled.gain)) <= 1.011 * cost(chosen)


def test_noise_does_not_decide_between_steps_that_take_equally_long():
    """Scaled to the span of the candidates, half a per cent would be a whole axis."""
    dense = Point(ratio=1, seconds=1.0, gain=1.0)
    assert knee([dense, Point(ratio=0.1, seconds=0.995, gain=0.9)]) == dense
    assert knee([dense, Point(ratio=0.1, seconds=0.995, gain=0.999)]) == dense
    assert knee([dense, Point(ratio=0.1, seconds=0.5, gain=0.9)]).ratio == 0.1
    assert knee([dense, Point(ratio=0.1, seconds=0.5, gain=0.3)]) == dense


def test_each_share_is_tried_and_the_knee_is_kept():
    play = Play(make(), slow_link)
    sent = play.steps(EXPLORING + REST)
    numbers = [round(NUM_VALUES * ratio) for ratio in RATIOS]
    assert sent[:EXPLORING] == [number for number in numbers for _ in range(SAMPLE)]
    measured = [
        Point(
            ratio=number / NUM_VALUES,
            seconds=slow_link(number / NUM_VALUES),
            gain=sum(play.gains[place * SAMPLE :][:SAMPLE]) / SAMPLE,
        )
        for place, number in enumerate(numbers)
    ]
    assert set(sent[EXPLORING:]) == {round(NUM_VALUES * knee(measured).ratio)}
    assert sent[-1] < NUM_VALUES


def test_between_samples_nothing_is_measured_or_exchanged():
    def work(member):
        play = Play(make(member), slow_link)
        play.steps(EXPLORING + 1)
        before = member.sums, play.compressor.calls
        play.steps(REST - 1)
        return before == (member.sums, play.compressor.calls)

    assert all(together(2, work))


def test_candidates_are_tried_again_when_the_gain_has_moved():
    noise = {"size": 0}
    play = Play(make(), slow_link, gradient=lambda step: uneven(step) + noise["size"] * even(step))
    play.steps(EXPLORING + REST)
    chosen = play.sent[-1]
    assert chosen < NUM_VALUES
    noise["size"] = 20
    play.steps(SAMPLE)
    assert play.steps(SAMPLE) == [NUM_VALUES] * SAMPLE
