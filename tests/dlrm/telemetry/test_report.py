"""The final report as a table."""

from dataclasses import replace

import pytest

from dlrm.comm.feedback import LostResiduals
from dlrm.comm.stats import ExchangeFigures
from dlrm.metrics import MetricValues
from dlrm.telemetry.report import (
    FailureHistory,
    Report,
    SavesReport,
    exchange_report,
    format_report,
)

VALUES = MetricValues(
    num_samples=1000,
    auc=0.78123,
    auc_error_bound=0.0,
    log_loss=0.45,
    normalized_entropy=0.81,
    calibration=1.002,
    note="",
)
REPORT = Report(
    recipe="tiny",
    run_folder="runs/here",
    metrics=VALUES,
    best_auc=0.8,
    steps=4000,
    samples=4_096_000,
    seconds=131.2,
    samples_per_s=31_204.4,
)


def test_the_table_is_aligned_and_complete():
    assert format_report(REPORT) == "\n".join(
        [
            "AUC                           0.7812",
            "log loss                      0.4500",
            "normalized entropy            0.8100",
            "calibration                   1.0020",
            "best AUC any model can reach  0.8000",
            "training samples/s            31,204",
            "steps                         4,000",
            "training samples              4,096,000",
            "time                          2 min 11 s",
            "run folder                    runs/here",
        ]
    )


def test_the_report_shows_the_exchange_and_lost_gradients():
    first = ExchangeFigures(
        name="ring fp32", steps=100, seconds=0.001, step_seconds=0.02, kept_share=1.0, sent_bytes=4e6
    )
    later = replace(first, name="AR-Topk STAR, ring fp32", steps=300, kept_share=0.01, sent_bytes=2e5)
    lost = LostResiduals(step=7, ranks=(1,), of_ranks=2, energy_share=0.5)
    assert exchange_report([], [lost]) is None
    exchange = exchange_report([first, later], [lost])
    assert exchange.share == pytest.approx(0.05)
    assert exchange.sent_bytes == pytest.approx((4e6 + 6e5) / 4)
    table = format_report(replace(REPORT, exchange=exchange))
    told = "AR-Topk STAR, ring fp32: 1.0 ms, 5.0% of a step; 1.15 MB a rank, 25.75% of the values"
    assert f"exchange of dense gradients   {told}" in table
    assert "at step 7, gradients that rank 1 of 2 had not sent yet: 50.0% of the energy" in table
    dense = exchange_report([replace(first, step_seconds=0.0)], [])
    table = format_report(replace(REPORT, exchange=dense))
    assert "exchange of dense gradients   ring fp32: 1.0 ms; 4.00 MB a rank\n" in table


def test_undefined_metrics_have_a_reason_and_durations_fitting_units():
    values = replace(VALUES, auc=None, normalized_entropy=None, note="all 1000 labels are 0")
    text = format_report(replace(REPORT, metrics=values, seconds=7530))
    assert text.count("not defined: all 1000 labels are 0") == 2
    assert "time                          2 h 5 min" in text
    assert "time                          9 s" in format_report(replace(REPORT, seconds=9.4))


RECOVERY = {
    "step": 1200,
    "kind": "partial",
    "reason": "25.0% of the tables were lost",
    "dead": [{"rank": 1, "why": "gone with its memory"}, {"rank": 0, "why": "RuntimeError: " + "x " * 100}],
    "sources": [{"adopted": 300, "moved": 0, "lost": 100}, {"adopted": 0, "moved": 7, "lost": 0}],
    "save_step": 1000,
    "seconds": {"restore": 0.25, "detect": 0.5},
}


def test_the_report_shows_recoveries():
    table = format_report(replace(REPORT, failures=FailureHistory(recoveries=(RECOVERY,), pls=0.0125)))
    lines = [line.split(maxsplit=1) for line in table.splitlines()]
    assert ["recoveries", "1"] in lines
    assert ["rows", "300 stayed in memory, 7 moved, 100 from the checkpoint"] in lines
    assert ["seconds", "0.8 (detect 0.5, restore 0.2)"] in lines
    assert "at step 1,200" in table
    assert "partial: 25.0% of the tables were lost" in table
    assert "rank 1: gone with its memory; rank 0: RuntimeError: x" in table
    assert max(map(len, table.splitlines())) < 170
    assert "portion of lost samples (PLS)  0.012500" in table


def test_the_report_shows_full_recoveries():
    everything = {**RECOVERY, "kind": "full", "sources": []}
    table = format_report(replace(REPORT, failures=FailureHistory(recoveries=(everything,), pls=None)))
    assert "all from the checkpoint" in table
    assert "not known" in table
    table = format_report(
        replace(
            REPORT,
            failures=FailureHistory(recoveries=({**everything, "save_step": None},), pls=0.0),
        )
    )
    assert "initial values" in table


def test_the_report_shows_the_cost_of_saves():
    saves = SavesReport(num_bases=2, num_row_saves=31, blocked_s=0.0042)
    table = format_report(replace(REPORT, failures=FailureHistory(recoveries=(), pls=0.0, saves=saves)))
    assert "2 of everything, 31 of rows; training waits 4.2 ms for one" in table
