"""Metrics of click prediction: AUC, log loss, normalized entropy and calibration.

`ClickMetrics` evaluates over all ranks. `RunningAuc` is an estimate for the progress bar, on one rank.
`ChanceWatch` warns when a model learns nothing.
"""

from dlrm.metrics.click import ClickMetrics, MetricValues
from dlrm.metrics.running import WORSE_THAN_MEAN, ChanceWatch, RunningAuc

__all__ = ["WORSE_THAN_MEAN", "ChanceWatch", "ClickMetrics", "MetricValues", "RunningAuc"]
