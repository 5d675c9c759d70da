"""How good the clicks are predicted: AUC, log loss, normalized entropy, calibration, and when to worry.

`ClickMetrics` is the honest measurement of an evaluation, over all ranks. `RunningAuc` is the quick look
for the progress bar, on one rank. `ChanceWatch` says so when a model learns nothing.
"""

from dlrm.metrics.click import ClickMetrics, MetricValues
from dlrm.metrics.running import ChanceWatch, RunningAuc

__all__ = ["ChanceWatch", "ClickMetrics", "MetricValues", "RunningAuc"]
