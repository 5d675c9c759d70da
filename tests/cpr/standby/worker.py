"""A worker for test_standby: notes on its output who it is and what it sees, then does what it is told."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from cpr import standby

PREPARED_BY = []


def prepare():
    PREPARED_BY.append(os.getpid())


def work():
    print(
        json.dumps(
            {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "prepared_here": [os.getpid()] == PREPARED_BY,
                "arguments": sys.argv[1:],
                "rank": os.environ["RANK"],
                "folder": str(Path.cwd()),
            }
        ),
        flush=True,
    )
    match sys.argv[1]:
        case "code":
            return int(sys.argv[2])
        case "raise":
            raise ValueError("what went wrong")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            print("waiting", flush=True)
            time.sleep(60)
    raise AssertionError


if __name__ == "__main__":
    raise SystemExit(standby.run(prepare, work))
