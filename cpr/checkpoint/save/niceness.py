"""The manners of threads that save while training runs."""

import os
import threading
from contextlib import suppress
from typing import Final

NICENESS: Final = 10
"""Of a background thread."""


def give_way() -> None:
    """Let training's threads go first wherever this thread competes with them for a processor."""
    with suppress(OSError, AttributeError):  # Linux alone has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
