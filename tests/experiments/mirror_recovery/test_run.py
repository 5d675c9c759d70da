"""The experiment on recoveries from mirrors: its arithmetic; its kinds of recovery are in `tests/system`."""

import pytest

from experiments.mirror_recovery import run


def side(met, *others):
    return {"phases": dict(zip(run.LABELS, (met, *others), strict=True))}


def test_ratios_are_taken_within_a_round_and_the_first_one_only_warms_up():
    rows = [{"key": run.WARM_UP, "mirror": side(90, 1, 1, 1), "checkpoint": side(1, 1, 1, 1)}]
    rows += [
        {"key": f"round {number}", "mirror": side(4, 0, s, 0), "checkpoint": side(4, s, s, 2 * s)}
        for number, s in enumerate((1, 2, 4))
    ]
    figures = run.figures_of(rows)
    assert figures["mirror_recovery_ratio"] == pytest.approx(6 / 12)
    assert figures["mirror_recovery_ratio_low"] == pytest.approx(8 / 20)
    assert figures["mirror_recovery_ratio_high"] == pytest.approx(5 / 8)
    assert (figures["recovery_s_mirror"], figures["recovery_s_checkpoint"]) == (6, 12)
    for edge in ("", "_low", "_high"):
        assert figures[f"mirror_recovery_ratio_after_rendezvous{edge}"] == 1 / 4
    assert figures["recovery_s_checkpoint_after_rendezvous"] == 8


def test_a_recovery_has_the_seconds_of_each_rank_and_must_be_of_its_kind():
    report = {"kind": "mirror", "step": 30}
    marks = [
        {"event": event, "rank": rank, "generation": 1, "time": 10.0 + number + rank}
        | ({"report": report | {"seconds": {"restore": rank}}} if event == "stepped" else {})
        for number, event in enumerate(run.LABELS)
        for rank in (1, 0)
    ]
    row = run._recovery(marks, 8.0, "mirror")
    assert row["phases"] == {"met": 3.0, "built": 1.0, "restored": 1.0, "stepped": 1.0}
    assert (row["step"], row["seconds"]) == (30, [{"restore": 0}, {"restore": 1}])
    with pytest.raises(RuntimeError, match="of the kind partial"):
        run._recovery(marks, 8.0, "partial")
