"""Frees a run's memory when nobody else can: a small process that waits for the end of the run's agent.

A worker starts it; it leaves the worker's session at once, holds none of its files, and imports nothing but
the standard library and modules of `cpr` that do no more. There is one for each run on a machine. It keeps
away from a run while one of its agents lives, or a worker owns a segment; when the memory is gone, so is the
janitor.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from cpr.agent import agent_pid, launcher_of_this_worker
from cpr.processes import Process
from cpr.resident.folders import (
    JANITOR_FILE,
    KEEPER_PREFIX,
    alone_in,
    is_locked,
    live_keepers,
    live_segments,
    open_private,
    remove_home,
    try_lock,
)

LOOK_S: Final = 1.0
"""How often it looks who is alive."""


def ensure_janitor(home: Path) -> None:
    """Keep a run's memory while somebody above would start this worker again, and have it freed afterwards.

    That is torchrun, and the `cpr run` above it if there is one: each outlives a kill of the other.

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
            keeper = home / f"{KEEPER_PREFIX}{agent.pid}-{agent.start_ticks}"
            os.close(open_private(keeper, os.O_RDWR | os.O_CREAT))
        if is_locked(home / JANITOR_FILE):
            return
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
    try:
        file = open_private(home / JANITOR_FILE, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        return
    if try_lock(file):
        while home.is_dir() and not _freed(home):
            time.sleep(LOOK_S)
    os.close(file)


def _freed(home: Path) -> bool:
    if live_keepers(home):
        return False
    with alone_in(home) as there:
        if there and (live_keepers(home) or live_segments(home)):
            return False
        if there:
            remove_home(home)
    return True
