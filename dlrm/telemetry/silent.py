"""Telemetry of ranks that say nothing."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cpr.estimator.history import SaveCost
from cpr.recovery.run.report import Recovery
from dlrm.comm.feedback.residual import LostResiduals
from dlrm.comm.stats.figures import ExchangeFigures
from dlrm.metrics import MetricValues
from dlrm.telemetry.learning_curve import CurvePoint
from dlrm.telemetry.report import FailureReport


class NoTelemetry:
    """Telemetry of all ranks but 0: says and writes nothing, but could tell how far the run is."""

    def __init__(self) -> None:
        self._steps = self._samples = self._num_recoveries = 0
        self._curve: list[CurvePoint] = []

    def begin(self) -> None:
        """Nothing."""

    def step(self, *, step: int, samples: int, **_: Any) -> None:
        """Remember how far the run is."""
        self._steps, self._samples = step, samples

    def exchange(self, figures: ExchangeFigures | None) -> None:
        """Nothing."""

    def costs(self, saves: Sequence[SaveCost], recoveries: Sequence[Recovery]) -> None:
        """Remember of how many recoveries rank 0 has told."""
        self._num_recoveries = len(recoveries)

    def evaluating(self) -> None:
        """Nothing."""

    def evaluation(self, *, samples: int, values: MetricValues, **_: Any) -> None:
        """Remember a point of the learning curve."""
        self._curve.append(CurvePoint(samples=samples, auc=values.auc, log_loss=values.log_loss))

    def finish(self, failures: FailureReport | None = None, losses: Sequence[LostResiduals] = ()) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """What rank 0 would go on with if its own were lost."""
        return {
            "steps": self._steps,
            "samples": self._samples,
            "curve": [asdict(point) for point in self._curve],
            "recoveries": self._num_recoveries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._steps, self._samples = state["steps"], state["samples"]
        self._num_recoveries = state.get("recoveries", 0)
        self._curve = [CurvePoint(**point) for point in state["curve"]]
