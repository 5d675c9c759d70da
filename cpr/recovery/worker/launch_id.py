"""What launched a worker: by this a run knows its own saves after a failure, and its own end.

Sessions do not tell: a launch that loses all memory begins another one. There are several launches with
several nodes, any of which may be replaced; one that is still there is enough.
"""

import os
import socket

from cpr.processes import launcher_of_this_worker
from cpr.resident.home import LAUNCH_VARIABLE


def launch_of_this_worker() -> str:
    """What no other launch shares, at any time: which `cpr run`, or else which torchrun on this host.

    Empty if that is gone. `--rdzv-id` is no part of it: people choose the same again.
    """
    launcher = launcher_of_this_worker()
    of_agent = f"{socket.gethostname()}-{launcher.pid}-{launcher.start_ticks}" if launcher else ""
    return os.environ.get(LAUNCH_VARIABLE) or of_agent
