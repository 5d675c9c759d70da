"""Names by which people (`ps -o comm`) and programs tell the processes apart that share one command line."""

import ctypes
from typing import Final

PREPARED: Final = "cpr-standby"
WORKER: Final = "cpr-worker"
"""A fork of the prepared process."""
STAND_IN: Final = "cpr-for-"
"""Followed by the pid of the fork that does this process's work; at most 15 characters, as Linux has it."""

PR_SET_NAME: Final = 15


def name_this_process(name: str) -> None:
    """Give this process's main thread a name."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
