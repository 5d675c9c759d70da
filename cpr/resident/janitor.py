"""Janitor: a small process that frees a run's memory when the run's agents and workers have ended.

A worker starts the janitor, which leaves the worker's session at once, holds none of its files, and imports
only the standard library and modules of `cpr` that do the same. There is one for each run on a machine, or
for each PID namespace (containers may share /dev/shm). If the janitor was killed, the start of the next run
frees the memory (`cleanup`).
"""

import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from cpr.processes import Process, agent_pid, launcher_of_this_worker
from cpr.resident.cleanup import RUN_FILE, check_command, free_leftovers
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
"""Pause between checks for live agents."""
FIRST_CHECK_S: Final = 10.0
"""Pause after the first check whether unsaved memory is still of use; each later one is twice as long."""
LONGEST_CHECK_S: Final = 600.0
"""Longest pause between two checks."""

logger = logging.getLogger(__name__)


def ensure_janitor(home: Path) -> None:
    """Keep a run's memory while a launcher could restart this worker, and have it freed afterwards.

    Launchers are torchrun, and the `cpr run` above it: each may survive the other. Leftovers of earlier runs
    in the same memory file system are freed first.

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
    # Isolated mode runs no code of the user's environment, so the path of this package must be passed.
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
    """Detach, then watch the run whose folder is on the command line."""
    if os.fork():
        return  # the worker waits only for this process, and the janitor is not its child
    os.setsid()
    watch(Path(sys.argv[1]))


def watch(home: Path) -> None:
    """Wait until a run's memory is not needed any more, and free it; at most one janitor does so."""
    with alone_in(home) as there:  # others check the lock inside such a block, too
        if not there:
            return
        file = open_private(janitor_file(home), os.O_RDWR | os.O_CREAT)
        is_mine = try_lock(file)
    pause_s, next_check_s = FIRST_CHECK_S, 0.0
    while is_mine and home.is_dir() and not _is_done(home):
        if not live_keepers(home) and time.monotonic() >= next_check_s:
            _check_unsaved(home)
            next_check_s, pause_s = time.monotonic() + pause_s, min(2 * pause_s, LONGEST_CHECK_S)
        time.sleep(LOOK_S)
    os.close(file)


def _is_done(home: Path) -> bool:
    """Free the memory if no process needs it; returns whether the janitor can end."""
    if live_keepers(home):
        return False
    with alone_in(home) as there:
        if there and (live_keepers(home) or live_segments(home) or unsaved_segments(home)):
            return False
        if there:
            remove_dead_keepers(home)
            if not foreign_keepers(home):
                remove_home(home)
    return True


def _check_unsaved(home: Path) -> None:
    """Ask the checkpoint directory whether the run has continued without the memory that it could not save.

    Storage needs libraries, which a janitor does not load: another process asks.
    """
    if not unsaved_segments(home) or not (home / RUN_FILE).exists():
        return
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command, quiet = check_command(home / RUN_FILE), subprocess.DEVNULL
    with suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, timeout=60, check=False
        )
