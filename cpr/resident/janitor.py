"""Frees a run's memory when nobody else can: a small process that waits for the end of the run's agent.

A worker starts it; it leaves the worker's session at once, holds none of its files, and imports nothing but
the standard library and modules of `cpr` that do no more. There is one for each run on a machine, or in each
PID namespace of it (containers may share /dev/shm). It keeps away from a run while one of its agents or
workers lives; when the memory is gone, so is the janitor. What is left if the janitor was killed is
freed by the start of the next run (`leftovers`).
"""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from cpr.processes import Process, agent_pid, launcher_of_this_worker
from cpr.resident.cleanup import free_leftovers
from cpr.resident.folders import (
    KEEPER_PREFIX,
    alone_in,
    foreign_keepers,
    is_locked,
    janitor_file,
    live_keepers,
    live_segments,
    open_private,
    remove_dead_keepers,
    remove_home,
    try_lock,
    unsaved_segments,
)

LOOK_S: Final = 1.0
"""How often it looks who is alive."""

logger = logging.getLogger(__name__)


def ensure_janitor(home: Path) -> None:
    """Keep a run's memory while somebody above would start this worker again, and have it freed afterwards.

    That is torchrun, and the `cpr run` above it if there is one: each outlives a kill of the other. At the
    start of a run, what earlier runs have left in the same memory file system is freed first.

    Args:
        home: the run's folder.

    Raises:
        OSError: the janitor cannot be started.
    """
    above = {launcher_of_this_worker(), Process.find(agent_pid())}
    with alone_in(home) as there:
        if not there:
            return
        for agent in filter(None, above):
            os.close(open_private(home / f"{KEEPER_PREFIX}{agent.tag}", os.O_RDWR | os.O_CREAT))
        if is_locked(janitor_file(home)):
            return
    for left, num_bytes in free_leftovers(home.parent.parent):
        logger.info(
            "freed %.1f MB of shared memory that a run which is over had left: %s", num_bytes / 1e6, left
        )
    # In isolated mode nothing of the user's set-up runs, so the place of this package must be told.
    package_root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({package_root!r}); from cpr.resident.janitor import main; main()"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(home)],
        check=True,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    """Detach, then watch over the run whose folder the command line names."""
    if os.fork():
        return  # the worker waits for this process only: the janitor is nobody's child
    os.setsid()
    watch(Path(sys.argv[1]))


def watch(home: Path) -> None:
    """Wait until nobody needs a run's memory, and free it; at once if another janitor does so already."""
    with alone_in(home) as there:  # where others only look whether it is locked
        if not there:
            return
        file = open_private(janitor_file(home), os.O_RDWR | os.O_CREAT)
        is_mine = try_lock(file)
    while is_mine and home.is_dir() and not _is_done(home):
        time.sleep(LOOK_S)
    os.close(file)


def _is_done(home: Path) -> bool:
    """Whether nothing is left to do: the memory is freed, or kept for others or because it was not saved."""
    if live_keepers(home):
        return False
    with alone_in(home) as there:
        if there and (live_keepers(home) or live_segments(home)):
            return False
        if there:
            remove_dead_keepers(home)
            if not foreign_keepers(home) and not unsaved_segments(home):
                remove_home(home)
    return True
