"""The tracker of each scheme."""

from collections.abc import Mapping
from typing import Final

from cpr.priority.change import ChangeTracker
from cpr.priority.config import Scheme
from cpr.priority.controls import NoTracker, RandomTracker, RoundRobinTracker
from cpr.priority.frequency import FrequencyTracker
from cpr.priority.recency import RecencyTracker
from cpr.priority.subsampled import SubsampledTracker
from cpr.priority.touched import TouchedTracker
from cpr.priority.tracker import Tracker

TRACKERS: Final[Mapping[Scheme, type[Tracker]]] = {
    "mfu": FrequencyTracker,
    "ssu": SubsampledTracker,
    "scar": ChangeTracker,
    "random": RandomTracker,
    "mru": RecencyTracker,
    "touched": TouchedTracker,
    "round_robin": RoundRobinTracker,
    "never": NoTracker,
}
