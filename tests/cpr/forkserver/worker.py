"""A worker for fork server tests: prints its properties, then does what its arguments ask for."""

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cpr import forkserver
from cpr.processes import agent_pid

PREPARED_BY = []


def prepare():
    PREPARED_BY.append(os.getpid())
    if "NUMPY" in os.environ:
        import numpy.random  # noqa: F401, PLC0415
    if "THREAD" in os.environ:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def work():
    print(
        json.dumps(
            {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "agent": agent_pid(),
                "prepared_here": [os.getpid()] == PREPARED_BY,
                "arguments": sys.argv[1:],
                "rank": os.environ["RANK"],
                "folder": str(Path.cwd()),
                "processors": sorted(os.sched_getaffinity(0)),
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
        case "large":  # takes a while to free its memory when it dies
            memory = b"1" * 400_000_000
            print("waiting", flush=True)
            time.sleep(60 + memory[0])
        case "native":  # without releasing the GIL, as badly behaved libraries do
            print("waiting", flush=True)
            ctypes.PyDLL(None).sleep(60)
        case "random":
            print(json.dumps([random.random(), sys.modules["numpy"].random.rand()]), flush=True)
            return 0
        case "nested":
            command = [sys.executable, sys.argv[0], *sys.argv[2:]]
            return subprocess.run(command, check=False).returncode
        case "dump":
            os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


if __name__ == "__main__":
    raise SystemExit(forkserver.run(prepare, work))
