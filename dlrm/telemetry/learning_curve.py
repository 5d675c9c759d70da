"""The learning curve as a picture: AUC and log loss on the test days against training samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One evaluation on the learning curve."""

    samples: int
    """Training samples done before the evaluation."""
    auc: float | None
    log_loss: float | None


def draw_learning_curve(path: Path, curve: Sequence[CurvePoint], best_auc: float | None, title: str) -> None:
    """Draw AUC and log loss of all evaluations, and the best AUC if known, into the picture file `path`."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # slow to import, and needed once at the end

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, "AUC on the test days", [(point.samples, point.auc) for point in curve])
    _draw(right, "log loss on the test days", [(point.samples, point.log_loss) for point in curve])
    if best_auc is not None:
        label = f"best any model can reach: {best_auc:.4f}"
        left.axhline(best_auc, color="black", linestyle="--", linewidth=1, label=label)
        left.legend(loc="lower right")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw(axes: "Axes", label: str, points: Sequence[tuple[int, float | None]]) -> None:
    defined = [(samples, value) for samples, value in points if value is not None]
    axes.plot([samples for samples, _ in defined], [value for _, value in defined], marker="o", markersize=3)
    axes.set_xlabel("training samples")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
