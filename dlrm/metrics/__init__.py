"""Metrics of click prediction: AUC, log loss, normalized entropy and calibration; means of a model's own.

`ClickMetrics` and `SampleMeans` evaluate over all ranks, `SlicedMetrics` slices of the samples, and
`Reliability` bins of similar predictions. `RunningAuc` is an estimate for the progress bar, on one rank.
`ChanceWatch` warns when a model learns nothing.
"""

from dlrm.metrics.click import ClickMetrics, MetricValues
from dlrm.metrics.means import SampleMean, SampleMeans
from dlrm.metrics.reliability import CalibrationBin, Reliability, calibration_error
from dlrm.metrics.running import WORSE_THAN_MEAN, ChanceWatch, RunningAuc
from dlrm.metrics.slices import SlicedMetrics

__all__ = [
    "WORSE_THAN_MEAN",
    "CalibrationBin",
    "ChanceWatch",
    "ClickMetrics",
    "MetricValues",
    "Reliability",
    "RunningAuc",
    "SampleMean",
    "SampleMeans",
    "SlicedMetrics",
    "calibration_error",
]
