"""Schedules have the same ordered events for the same seed, at the given rate."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.faults import AtRate, AtStep, AtTime, DamageFile, Event, Hang, KillWorker, Plan, Raise, Slow, Trace
from tests.cpr.faults.strategies import rates, schedules, step_events


def moments(schedule, number=200):
    return [event.time_s if event.step is None else event.step for event in islice(schedule, number)]


@given(schedule=schedules)
def test_schedule_is_ordered_and_reproducible(schedule):
    events = list(islice(schedule, 50))
    assert list(islice(schedule, 50)) == events
    assert moments(schedule, 50) == sorted(moments(schedule, 50))
    assert {event.unit for event in events} <= {schedule.unit}
    assert {event.kind for event in events} <= set(schedule.kinds_used)


@given(rate=rates, seed=st.integers(0, 2**32))
def test_events_depend_on_the_seed(rate, seed):
    other = AtRate(**{**vars(rate), "seed": seed, "num_events": 20})
    same = AtRate(**{**vars(rate), "num_events": 20})
    assert (list(other) == list(same)) == (seed == rate.seed)


def test_events_of_a_seed_are_the_same_on_every_machine():
    rate = AtRate(kinds=(KillWorker(), Hang()), seed=7, mean_s=60.0, distribution="weibull", shape=0.7)
    # as Python 3.11 draws them; other versions and machines must not differ
    assert [(round(event.time_s, 3), event.kind.name, event.target_of(4)) for event in islice(rate, 4)] == [
        (12.407, "kill_worker", 1),
        (63.401, "kill_worker", 1),
        (95.888, "hang", 3),
        (96.734, "kill_worker", 1),
    ]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_events_have_the_given_rate(seed):
    num_events = 2000
    by_time = AtRate(kinds=(Raise(),), seed=seed, mean_s=30.0, num_events=num_events)
    by_step = AtRate(kinds=(Raise(),), seed=seed, mean_steps=30.0, num_events=num_events)
    last_s, last_step = moments(by_time, num_events)[-1], moments(by_step, num_events)[-1]
    # A sum of exponentials: its standard deviation is mean * sqrt(n); 7 of them.
    assert abs(last_s - 30 * num_events) < 7 * 30 * num_events**0.5
    assert 0 <= last_step - last_s < 1  # the same draws, rounded up
    assert all(isinstance(step, int) for step in moments(by_step, num_events))


def test_kinds_are_equally_likely_and_so_are_targets():
    rate = AtRate(kinds=(Raise(), KillWorker(), KillWorker()), seed=3, mean_s=1.0, num_events=3000)
    kills = sum(event.kind == KillWorker() for event in rate)
    hits = sum(event.target_of(4) == 2 for event in rate)
    # Binomial: standard deviations are 25.8 and 23.7; 6 of them.
    assert abs(kills - 2000) < 155
    assert abs(hits - 750) < 142
    assert {event.target_of(4) for event in rate} == set(range(4))


@given(events=st.lists(step_events, max_size=8))
def test_trace_is_ordered(events):
    played = list(Trace(events=tuple(events)))
    assert played == sorted(events, key=lambda event: event.step)


def test_trace_is_read_from_csv(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "time_s,kind,target,duration_s,wipe,message\n"
        "30.5,kill_worker,1,,true,\n"
        "2,hang,,20,,\n"
        "40,raise,0,,,42\n"
    )
    assert Plan.read(path).schedules == (
        Trace(
            events=(
                Event(time_s=30.5, kind=KillWorker(wipe=True), target=1),
                Event(time_s=2.0, kind=Hang(duration_s=20.0)),
                Event(time_s=40.0, kind=Raise(message="42"), target=0),
            )
        ),
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("3,kill_workers,", r"line 2: .*'kill_workers' is no kind of failure; the kinds are raise, "),
        ("x,raise,", "line 2: step is 'x'; it must be a whole number"),
        (",raise,", "line 2: an event happens at a step or at a time_s"),
        ("3,raise,-1", "line 2: target is -1"),
        ("3,raise,1,7", "line 2: there are more cells"),
        ("3,,1", "line 2: .*no kind"),
    ],
)
def test_invalid_csv_is_refused_with_the_line(tmp_path, row, message):
    path = tmp_path / "trace.csv"
    path.write_text(f"step,kind,target\n{row}\n")
    with pytest.raises(ValueError, match=message):
        Plan.read(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AtStep(step=-1, kind=Raise()), "start at 0"),
        (lambda: AtTime(time_s=float("nan"), kind=Raise()), "start at 0"),
        (lambda: AtStep(step=1, kind=Raise(), target=-1), "target is -1"),
        (lambda: AtRate(kinds=(), seed=1, mean_s=1), "at least one kind"),
        (lambda: AtRate(kinds=(Raise(),), seed=1), "mean_s or mean_steps"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, mean_steps=1), "mean_s or mean_steps"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=0), "positive"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, num_events=-1), "num_events"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, distribution="pareto"), "pareto"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, distribution="gamma", shape=0), "shape"),
        (lambda: AtRate(kinds=(Raise(),), seed=1, mean_s=1, target=-2), "target is -2"),
        (
            lambda: Trace(events=(Event(kind=Raise(), step=1), Event(kind=Raise(), time_s=1))),
            "two traces",
        ),
        (lambda: Event(kind=Raise()), "one of the two"),
        (lambda: Event(kind=Raise(), step=1, time_s=1), "one of the two"),
        (lambda: Hang(duration_s=0), "duration_s"),
        (lambda: Slow(num_steps=3), "nothing makes this worker slow"),
        (lambda: Slow(num_steps=3, factor=0.5), "at least 1"),
        (lambda: DamageFile(how="burn"), "flip"),
    ],
)
def test_invalid_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
