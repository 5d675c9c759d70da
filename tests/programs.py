"""Programs that start as forks of one that has imported everything: seconds of processor time less for each.

`-m tests.programs MODULE ARGUMENTS` is `-m MODULE ARGUMENTS`, but all that find the pid of a living process
in `LENDER` share one that is prepared, as workers below one `cpr run` do: torchrun, workers, anything. For
tests of what programs do, not of how they start or who is whose parent.
"""

import atexit
import ctypes
import inspect
import logging
import os
import runpy
import sys
import threading
from importlib import import_module
from pathlib import Path

from cpr import forkserver
from cpr.processes import LAUNCH_PID, PROXY_NAME

LENDER = "CPR_TESTS_LENDER"
OWN_LAUNCH_PID = "CPR_TESTS_LAUNCH_PID"
"""Keeps what the program itself is to find in CPR_LAUNCH_PID."""
NETWORK = "CPR_TESTS_NETWORK"
"""Keeps the network namespace of programs that are not in that of the process which is prepared."""
OWN_NETWORK = "/proc/self/ns/net"

IMPORTED = (
    "dlrm.training.run",
    "torch.distributed.launcher",
    "torch.utils.tensorboard",
    "torchrec.distributed.train_pipeline",
)


def prepare() -> None:
    for name in IMPORTED:
        import_module(name)
    logging.getLogger().handlers.clear()  # which some import has set up, before the program could
    # where torchrun asks who called it, as it often does, `inspect` would look for this in all modules
    inspect.modulesbyfile["<frozen runpy>"] = "runpy"


def work() -> int:
    """Be the program; without one, this was only to prepare."""
    if LENDER in os.environ:
        _put(LAUNCH_PID, os.environ.pop(OWN_LAUNCH_PID, None))
    if NETWORK in os.environ:
        _enter(os.environ.pop(NETWORK))
    if not sys.argv[1:]:
        return 0
    del sys.argv[0]
    code: object = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    # ends as the interpreter does, but for taking thousands of modules apart, half a second of each fork
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> int:
    if LENDER not in os.environ:
        return work()
    _put(OWN_LAUNCH_PID, os.environ.get(LAUNCH_PID))
    _put(LAUNCH_PID, os.environ[LENDER])
    lenders = f"/proc/{os.environ[LENDER]}/ns/net"
    if not Path(lenders).samefile(OWN_NETWORK):  # its socket is known where it is itself
        own = os.open(OWN_NETWORK, os.O_RDONLY)
        os.environ[NETWORK] = f"/proc/{os.getpid()}/fd/{own}"
        _enter(lenders)
    return forkserver.run(prepare, work)


def _put(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _enter(network: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as namespace:  # noqa: PTH123 - is no file with content
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"{network} cannot be entered")


def at_work(pid: int) -> int:
    """The process that does the work of a program that was started as this process: a fork, or itself."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name.removeprefix(PROXY_NAME)) if name.startswith(PROXY_NAME) else pid


if __name__ == "__main__":
    raise SystemExit(main())
