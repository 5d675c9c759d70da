"""Settings of saving, and whether row trackers are reliable after each kind of start."""

from dataclasses import dataclass, field

import pytest

from cpr.priority import PriorityConfig
from cpr.recovery.run.report import Recovery, RowOrigin
from cpr.saving.setup import SaveSettings, num_nodes, settle_trackers


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


def test_share_of_rows_that_a_save_counts_for():
    options = {"every": 5, "moment": "rolling", "total_samples": None}
    assert SaveSettings(priority=None, **options).row_share == 1
    assert SaveSettings(priority=PriorityConfig(ratio=0.5), **options).row_share == 0.5
    touched = PriorityConfig(scheme="touched", ratio=0.5)
    assert SaveSettings(priority=touched, **options).row_share == 1  # all rows that have changed


def test_priority_without_periodic_saves_is_refused():
    with pytest.raises(ValueError, match="set save_every_steps"):
        SaveSettings(every=0, moment="rolling", priority=PriorityConfig(), total_samples=None)


@dataclass
class FakeShard:
    table_fqn: str
    num_rows: int = 10
    name: str = ""

    def __post_init__(self):
        self.name = f"{self.table_fqn}/r0-c0"


@dataclass
class FakePrioritizer:
    is_complete: bool
    prioritised: frozenset = frozenset({"big", "copied"})
    forgotten: list = field(default_factory=list)

    def forget_all(self):
        self.is_complete = True
        self.forgotten.append("all")

    def forget(self, name, ranges):
        self.forgotten.append((name, ranges))

    def doubt(self):
        self.is_complete = False


BIG, SMALL, COPIED = FakeShard("big"), FakeShard("small"), FakeShard("copied")
WHOLE, HALF = [(0, 10)], [(0, 5)]


def settle(kind, *, kept, shards=(BIG, SMALL), restored=None, moved=0, fell_back=False):
    prioritizer = FakePrioritizer(is_complete=kept)
    story = Recovery(
        kind=kind, reason="", generation=1, step=5, sources=(RowOrigin(table_fqn="big", moved=moved),)
    )
    settle_trackers(prioritizer, story, shards, restored or {}, fell_back)
    return prioritizer


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["start", "resume", "full"])
def test_what_was_loaded_is_what_is_saved(kind, kept):
    prioritizer = settle(kind, kept=kept, moved=7)
    assert prioritizer.is_complete
    assert prioritizer.forgotten == ["all"]


def test_what_stayed_in_place_keeps_its_trackers():
    prioritizer = settle("process", kept=True)
    assert (prioritizer.is_complete, prioritizer.forgotten) == (True, [])


def test_rows_that_came_from_the_checkpoint_are_forgotten():
    prioritizer = settle("partial", kept=True, restored={BIG.name: HALF})
    assert prioritizer.forgotten == [(BIG.name, HALF)]
    assert prioritizer.is_complete


def test_a_worker_whose_rows_all_came_from_the_checkpoint_knows_all():
    assert settle("partial", kept=False, restored={BIG.name: WHOLE}).is_complete
    assert settle("partial", kept=False, shards=[SMALL]).is_complete  # which are always saved whole


@pytest.mark.parametrize(
    ("shards", "restored"),
    [
        ([BIG], {}),
        ([BIG], {BIG.name: HALF}),
        # of what every rank has, this one's own lookups are lost with the worker that counted them
        ([BIG, COPIED], {BIG.name: WHOLE}),
    ],
)
def test_trackers_do_not_know_of_rows_whose_trackers_are_gone(shards, restored):
    assert not settle("partial", kept=False, shards=shards, restored=restored).is_complete


def test_trackers_do_not_know_of_rows_that_moved():
    assert not settle("process", kept=True, moved=3).is_complete


@pytest.mark.parametrize("kept", [False, True])
def test_trackers_do_not_know_what_has_changed_since_a_save_older_than_the_one_that_trackers_count_from(kept):
    assert not settle("partial", kept=kept, restored={BIG.name: WHOLE}, fell_back=True).is_complete
