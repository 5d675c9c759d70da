"""Which kind of recovery is possible, and the words for it."""

from dataclasses import replace

import pytest

from cpr.recovery.decide.assessment import Assessment, RecoveryPolicy, Slot, decide

FOUND = Assessment(
    slot=Slot(generation=0, step=7), slot_of=(0, 0), interrupted=False, held=(), needed=(), old_world_size=4
)
USUAL = {"found": FOUND, "lost_share": 0.25, "continues": True, "resumes": True, "is_saved": True}
GONE = {"found": replace(FOUND, old_world_size=0), "lost_share": 1.0}


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, "partial", "25.0% of the tables"),
        ({"lost_share": 0.0}, "process", "survived"),
        ({"lost_share": 0.0, "is_saved": False}, "process", "survived"),
        ({"lost_share": 0.5}, "partial", "50.0%"),
        (GONE, "full", "no worker's memory is left"),
        ({"found": replace(FOUND, slot=None)}, "full", "dense parameters"),
        ({"found": replace(FOUND, mismatch="table a has 5 rows now")}, "full", "table a has 5 rows now"),
        ({"is_saved": False}, "full", "nothing was saved yet"),
        ({"continues": False}, "resume", "newest checkpoint"),
        ({"continues": False, "is_saved": False}, "start", "nothing was saved"),
        ({"continues": False, "resumes": False}, "start", "starts over"),
        ({**GONE, "resumes": False}, "start", "starts over"),
        ({"resumes": False}, "partial", "25.0% of the tables"),
    ],
)
def test_decision(changes, kind, words):
    decision = decide(**{**USUAL, **changes})
    assert decision.kind == kind
    assert words in decision.reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_lost_share": -0.1},
        {"max_lost_share": 1.5},
        {"max_pls": 1.01},
        {"max_pls": -0.1},
        {"auc_per_pls": -0.1},
        {"max_generations_without_progress": 0},
    ],
)
def test_impossible_policies_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RecoveryPolicy(**wrong)
