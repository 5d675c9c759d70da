"""Figures of the measurements, and their picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.harness.plotting import median_bars
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate, median_figures


def rows_of(rows: Sequence[Row], case: str) -> list[Row]:
    """Rows of a case, by round."""
    found = [row for row in rows if row["case"] == case]
    return sorted(found, key=lambda row: int(row["round"]))


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    files, stream = rows_of(rows, "files"), rows_of(rows, "stream")
    kafka, folder, limited = (rows_of(rows, case) for case in ("kafka", "folder", "limited"))
    pairs = list(zip(stream, files, strict=True))
    killed = [row for row in rows if row["case"].startswith("killed")]
    unaccounted = [abs(row["arrived"] - row["trained"] - row["left_out"] - row["bad"]) for row in limited]
    return {
        **Estimate.of([one["auc"] - other["auc"] for one, other in pairs]).figures("stream_auc_delta"),
        **median_figures("stream_max_samples_per_s", [row["samples_per_s"] for row in stream]),
        **median_figures(
            "stream_speed_ratio", [one["samples_per_s"] / other["samples_per_s"] for one, other in pairs]
        ),
        **median_figures("stream_lag_s", [row["lag_s"] for row in kafka]),
        **median_figures("stream_folder_lag_s", [row["lag_s"] for row in folder]),
        **median_figures("stream_backlog_error", [row["backlog"]["error"] for row in kafka]),
        **median_figures("stream_largest_backlog", [row["largest"] / row["limit"] for row in limited]),
        "stream_unaccounted_records": max(unaccounted),
        "stream_kills": sum(row["kills"] for row in killed),
        "stream_lost_records": sum(row["lost"] for row in killed),
        "stream_repeated_records": sum(row["repeated"] for row in killed),
    }


def draw(result: Row, folder: Path) -> None:
    """Draw the backlog, measured and by the formula, with a limit and without, and the speeds."""
    rows = result["rows"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    backlogs, speeds = figure.subplots(1, 2)
    for number, row in enumerate(rows_of(rows, "kafka")):
        backlog = row["backlog"]
        steps, waiting = zip(*backlog["curve"], strict=True)
        measured = backlogs.plot(steps, waiting, color="tab:blue")[0]
        begin = waiting[0] - backlog["expected"] * steps[0]
        theory = backlogs.plot(
            steps, [begin + backlog["expected"] * each for each in steps], "k--", linewidth=0.8
        )[0]
        if not number:
            measured.set_label("measured")
            theory.set_label("(t S - b) T")
    for number, row in enumerate(rows_of(rows, "limited")):
        label = None if number else f"at most {row['limit']:,} may wait"
        backlogs.plot(*zip(*row["curve"], strict=True), color="tab:green", label=label)
    backlogs.set_xlabel("steps since more records arrive than are trained")
    backlogs.set_ylabel("records that wait")
    backlogs.legend()
    bars = {
        name: [row["samples_per_s"] / 1000 for row in rows_of(rows, case)]
        for case, name in {
            "files": "files",
            "stream": "the same as a stream",
            "kafka": "Kafka, small batches",
        }.items()
    }
    median_bars(speeds, bars, highlighted=[name for name in bars if name != "files"])
    speeds.set_xlabel("thousand samples/s (bar: median; dots: rounds)")
    figure.suptitle("Two workers on data that streams in", fontsize=11)
    figure.savefig(folder / "streaming.png", dpi=110)
