"""`dlrm.train` for `test_takeover`: stops at a given step, pretends to run on a machine of its own.

In the folder that CONTROL names, the file `hold` has the step after which all workers wait until the file
changes; each leaves a file named after the step. Workers that have ended their training wait while there is a
file `linger`, and leave a file as well.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from cpr.checkpoint.ownership import lock
from cpr.session import PartialRecovery
from dlrm import train
from dlrm.launch.process import leave

CONTROL = "CPR_TESTS_CONTROL"
MACHINE = "CPR_TESTS_MACHINE"
"""Name of the pretended machine: a lock of another machine cannot be checked by its process id."""
PATIENCE = timedelta(seconds=2)
LONGEST_WAIT_S = 100.0


def main() -> int:
    machine, control = os.environ[MACHINE], Path(os.environ[CONTROL])
    place, step = lock._place(), PartialRecovery.step
    lock._place = lambda: f"{machine} {place}"
    lock.DirectoryLock.__init__.__defaults__ = (PATIENCE,)

    def held_step(recovery: PartialRecovery, samples: int) -> None:
        step(recovery, samples)
        done = str(recovery.steps_done)
        if (control / "hold").read_text() == done:
            (control / f"held-{done}-{os.environ['RANK']}").touch()
            _wait_while(lambda: (control / "hold").read_text() == done)

    PartialRecovery.step = held_step
    code = train.main()
    if (control / "linger").exists():
        (control / f"ended-{os.getpid()}").touch()
        _wait_while((control / "linger").exists)
    return code


def _wait_while(condition) -> None:
    deadline = time.monotonic() + LONGEST_WAIT_S
    while condition() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    sys.argv[0] = "dlrm.train"
    leave(main())
