"""The story of a recovery, for users and for programs."""

import json

import pytest

from cpr.recovery.run.report import KILLED, Ending, Phases, Recovery, RowOrigin, Way

STORY = Recovery(
    kind="partial",
    reason="25.0% of the tables were lost",
    generation=3,
    step=1200,
    interrupted=True,
    dead=(
        Ending(rank=2, pid=77, host="node7", why=KILLED),
        Ending(rank=0, pid=None, host=None, why="?"),
    ),
    sources=(RowOrigin(table_fqn="ebc.a", adopted=1000, mirrored=8, lost=24),),
    save_step=1000,
    mirror_step=1199,
    mirror_rounded=3,
    refused=("segment x: is open to other users",),
    pls_added=0.001,
    pls_total=0.0035,
    ways=(Way(name="checkpoint rows", rows_s=0.5, lost=100.0, pls=None, is_chosen=True),),
    world_size=4,
    seconds={"build": 1.5, "detect": 0.25},
)


def test_it_comes_back_from_json():
    assert Recovery.from_dict(json.loads(json.dumps(STORY.to_dict()))) == STORY


def test_it_tells_who_died_where_rows_came_from_and_what_it_cost():
    assert str(STORY).splitlines() == [
        "generation 3 begins at step 1200 (partial): 25.0% of the tables were lost",
        f"  ended: rank 2 (process 77 on node7): {KILLED}",
        "  ended: rank 0: ?",
        "  not used: segment x: is open to other users",
        "  rows: ebc.a: 1,000 in place, 8 from the mirror of step 1199, 24 from the save of step 1000",
        "  of the rows in mirrors, 3 were rounded as yet",
        "  step 1201 was interrupted: its batch is half applied",
        "  PLS: 0.001000 added, 0.003500 in total",
        "  seconds: detect 0.25, build 1.50; together 1.75",
    ]


def test_phases_add_up_and_never_run_backwards():
    phases = Phases()
    with phases.measured("build"):
        pass
    phases.add("build", 1.0)
    phases.add("detect", -5.0)  # clocks of two machines
    assert phases.seconds["build"] >= 1.0
    assert phases.seconds["detect"] == 0.0
    with pytest.raises(AssertionError):
        phases.add("lunch", 1.0)
