"""Draws the calibration of a model."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from data.jobs.files import durable_file
from dlrm.metrics import CalibrationBin


def draw_calibration(path: Path, bins: Sequence[CalibrationBin], title: str) -> None:
    """Draw predicted probability against the share of clicks, with 95 % intervals, into a PNG file.

    Raises:
        ValueError: there are no bins, because the model gives no logits.
    """
    if not bins:
        raise ValueError(
            "this model gives no logits, so that its calibration cannot be drawn: leave --plot out"
        )
    from matplotlib.figure import Figure  # noqa: PLC0415  # slow to import, and not always needed

    predicted = [each.predicted for each in bins]
    observed = [each.observed for each in bins]
    # of a share of n samples; Wilson's interval would be wider only where there are next to no clicks
    spread = [1.96 * (each.observed * (1 - each.observed) / each.num_samples) ** 0.5 for each in bins]
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    limit = 1.05 * max([*predicted, *observed], default=1.0)
    axes.plot([0, limit], [0, limit], color="black", linestyle="--", linewidth=1, label="calibrated")
    axes.errorbar(predicted, observed, yerr=spread, marker="o", markersize=3, linewidth=1, capsize=2)
    axes.set_xlabel("predicted probability of a click")
    axes.set_ylabel("share of clicks")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    with durable_file(path) as file:
        file.write(picture.getbuffer())
