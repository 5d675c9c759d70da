"""Whose saves a directory holds: a run that is to begin anew goes on, after a failure, from its own alone.

Sessions do not tell: a launch that loses all memory begins another one. So a file beside the saves names who
launched the workers that wrote them. There are several with several nodes, any of which may be replaced; one
that is still there is enough.
"""

import json
import os
import socket
from collections.abc import Collection
from typing import Final

from cpr.agent import launcher_of_this_worker
from cpr.checkpoint.opening import on_rank_0
from cpr.checkpoint.ranks import RankGroup
from cpr.checkpoint.storage import Storage, read_file
from cpr.errors import CorruptFileError
from cpr.resident.home import LAUNCH_VARIABLE

LAUNCHES_PATH: Final = "LAUNCHES"


def launch_of_this_worker() -> str:
    """What no other launch shares, at any time: which `cpr run`, or else which torchrun on this host.

    Empty if that is gone. `--rdzv-id` is no part of it: people choose the same again.
    """
    launcher = launcher_of_this_worker()
    of_agent = f"{socket.gethostname()}-{launcher.pid}-{launcher.start_ticks}" if launcher else ""
    return os.environ.get(LAUNCH_VARIABLE) or of_agent


def note_launches(storage: Storage, group: RankGroup, launches: Collection[str]) -> None:
    """From now on the saves of a directory are of these launches. Called by all ranks, before they save.

    Raises:
        CheckpointError: the directory cannot be written to.
    """

    def write() -> None:
        with storage.create(LAUNCHES_PATH) as sink:
            sink.write(memoryview(json.dumps(sorted(launches)).encode()))

    on_rank_0(group, write)


def is_of_launches(storage: Storage, group: RankGroup, launches: Collection[str]) -> bool:
    """Whether the saves of a directory are known to be of one of these launches. Called by all ranks.

    Raises:
        CheckpointError: the directory cannot be read.
    """

    def look() -> bool:
        try:
            noted = json.loads(read_file(storage, LAUNCHES_PATH))
        except (CorruptFileError, ValueError):  # not there, or not ours
            return False
        return not set(launches).isdisjoint(noted)

    return on_rank_0(group, look)
