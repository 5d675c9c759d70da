from dataclasses import dataclass

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from dlrm.models.dlrm import DotInteraction
from experiments.throughput.breakdown import KINDS, REST, _lineage, breakdown_ms, kind_of


@dataclass
class Event:
    name: str
    cpu_parent: "Event | None"
    self_cpu_time_total: float


def test_each_kind_is_the_median_over_steps_and_other_threads_are_left_out():
    events = []
    for number, time_us in enumerate([1000.0, 2000.0, 90_000.0]):
        step = Event(f"ProfilerStep#{number}", None, 500.0)
        call = Event("_Layers", step, 0.0)
        events += [step, call, Event("aten::mm", call, time_us), Event("aten::cat", step, 10.0)]
    events.append(Event("aten::mm", None, 1e9))
    found = breakdown_ms(events)
    assert found["matrix products"] == 2.0
    assert found["casts and copies"] == 0.01
    assert found[REST] == 0.5
    assert list(found) == list(KINDS)


def profiled(step):
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=3, repeat=1)
    ) as profiler:
        for _ in range(4):
            step()
            profiler.step()
    return profiler.events()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_profiled_dot_interaction_counts_as_interaction_alone(dtype):
    """Even its copies and gathers, which the profiler names by the class of the autograd function."""
    names = ["a", "b", "c"]
    interaction = DotInteraction(names, 8)
    dense, pooled = (torch.rand(64, width, dtype=dtype, requires_grad=True) for width in (8, 3 * 8))
    gradient = torch.ones_like(interaction(dense, pooled, names))
    events = profiled(
        lambda: torch.autograd.grad(interaction(dense, pooled, names), (dense, pooled), gradient)
    )
    operators = [event for event in events if event.name.startswith("aten::")]
    assert {event.name for event in operators} >= {"aten::cat", "aten::bmm", "aten::gather"}
    kinds = {event.name: kind_of(each.name for each in _lineage(event)) for event in operators}
    assert kinds == dict.fromkeys(kinds, "interaction")
    assert breakdown_ms(events)["interaction"] > 0
