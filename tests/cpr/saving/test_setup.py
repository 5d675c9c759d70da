"""What the user says about saving."""

import pytest

from cpr.priority import PriorityConfig
from cpr.saving.setup import SavePlan, num_nodes


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        ({"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}, 3),  # torchrun's agents
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
    ],
)
def test_failure_domains(monkeypatch, environment, nodes):
    for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert num_nodes(8) == nodes


def test_without_priority_a_save_holds_all_rows():
    options = {"every": 5, "moment": "rolling", "total_samples": None}
    assert SavePlan(priority=None, **options).row_share == 1
    assert SavePlan(priority=PriorityConfig(ratio=0.5), **options).row_share == 0.5


def test_priority_without_periodic_saves_is_refused():
    with pytest.raises(ValueError, match="set save_every_steps"):
        SavePlan(every=0, moment="rolling", priority=PriorityConfig(), total_samples=None)
