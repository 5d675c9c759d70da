"""The tracker of each scheme."""

from collections.abc import Mapping
from typing import Final

from cpr.priority.config import Scheme
from cpr.priority.frequency import FrequencyTracker
from cpr.priority.tracker import Tracker

TRACKERS: Final[Mapping[Scheme, type[Tracker]]] = {
    "mfu": FrequencyTracker,
}
