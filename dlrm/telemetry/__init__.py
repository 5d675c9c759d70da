"""What a run leaves behind and shows while it goes: its folder, its metrics, its progress.

Rank 0 holds a `Telemetry`, the other ranks a `NoTelemetry`; `open_telemetry` gives the right one.
"""

from dlrm.telemetry.folder import make_run_folder
from dlrm.telemetry.recorder import Telemetry, open_telemetry
from dlrm.telemetry.silent import NoTelemetry

__all__ = ["NoTelemetry", "Telemetry", "make_run_folder", "open_telemetry"]
