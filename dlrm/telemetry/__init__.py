"""The run folder, metrics, progress display and final report of a training run."""

from dlrm.telemetry.folder import make_run_folder
from dlrm.telemetry.recorder import Recorder, Telemetry, open_telemetry

__all__ = ["Recorder", "Telemetry", "make_run_folder", "open_telemetry"]
