"""Kinds, events and schedules of all sorts, for hypothesis."""

import dataclasses
import errno
from typing import get_args

from hypothesis import strategies as st

from cpr.faults import AtRate, AtStep, AtTime, Event, Plan, StorageOutage, Trace
from cpr.faults.kinds import KILL, KINDS, Kind, Operation

SEEDS = st.integers(0, 2**40)
TARGETS = st.none() | st.integers(0, 100)
SECONDS = st.floats(1e-3, 1e6)
STEPS = st.integers(0, 10**9)

_FIELDS = {
    "message": st.text(max_size=20),
    "wipe": st.booleans(),
    "workers": st.booleans(),
    "lasting": st.booleans(),
    "duration_s": SECONDS,
    "delay_s": SECONDS,
    "extra_s": st.floats(0, 100),
    "factor": st.floats(1.001, 100),
    "num_steps": st.integers(1, 10**6),
    "at": st.integers(1, 10**6),
    "how": st.sampled_from(["any", "flip", "truncate", "remove"]),
    "operation": st.sampled_from(get_args(Operation)),
    "path": st.text(max_size=20),
    "reads": st.booleans(),
    "error": st.sampled_from([KILL, *errno.errorcode.values()]),
}
_OWN_FIELDS = {
    StorageOutage: {
        "how": st.sampled_from(["fail", "hang"]),
        "error": st.sampled_from(list(errno.errorcode.values())),
    }
}


def _of(kind: type[Kind]) -> st.SearchStrategy[Kind]:
    fields = {**_FIELDS, **_OWN_FIELDS.get(kind, {})}
    return st.builds(kind, **{field.name: fields[field.name] for field in dataclasses.fields(kind)})


kinds = st.one_of([_of(kind) for kind in KINDS.values()])
step_events = st.builds(Event, kind=kinds, step=STEPS, target=TARGETS, seed=SEEDS)
time_events = st.builds(Event, kind=kinds, time_s=SECONDS, target=TARGETS, seed=SEEDS)
_rate = {
    "kinds": st.lists(kinds, min_size=1, max_size=4).map(tuple),
    "seed": SEEDS,
    "distribution": st.sampled_from(["exponential", "gamma", "weibull"]),
    "shape": st.floats(0.2, 20),
    "target": TARGETS,
    "num_events": st.none() | st.integers(0, 50),
}
rates = st.builds(AtRate, mean_s=SECONDS, **_rate) | st.builds(AtRate, mean_steps=SECONDS, **_rate)
schedules = st.one_of(
    st.builds(AtStep, step=STEPS, kind=kinds, target=TARGETS, seed=SEEDS),
    st.builds(AtTime, time_s=SECONDS, kind=kinds, target=TARGETS, seed=SEEDS),
    rates,
    st.builds(Trace, events=st.lists(step_events, max_size=4).map(tuple)),
    st.builds(Trace, events=st.lists(time_events, max_size=4).map(tuple)),
)
plans = st.builds(Plan, schedules=st.lists(schedules, max_size=4).map(tuple))
