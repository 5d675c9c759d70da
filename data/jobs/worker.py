"""A worker process: `python -m data.jobs.worker FD PRELOAD`, started by `pool` alone."""

import importlib
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

RESULT: Final = "result"
ERROR: Final = "error"
PROGRESS: Final = "progress"

_to_parent: "Connection[object, object] | None" = None


def report(message: Any) -> None:
    """Send a message from a call that runs in a worker process to the queue of its pool.

    Args:
        message: anything picklable.
    """
    assert _to_parent is not None, "only calls in a worker process report"
    _to_parent.send((PROGRESS, message))


def main() -> None:
    """Run the calls that come through the connection until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    global _to_parent  # noqa: PLW0603  # a process has one parent
    pipe = _to_parent = Connection(int(sys.argv[1]))
    importlib.import_module(sys.argv[2])  # while the parent is still planning

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        while True:
            pipe.send(_outcome(*pipe.recv()))  # type: ignore[misc]  # by pool._call


def _outcome(call: Any, arguments: Any, keywords: Any) -> tuple[str, object]:
    try:
        return RESULT, call(*arguments, **keywords)
    except (ValueError, OSError) as error:
        return ERROR, error
    except Exception:
        return ERROR, RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    from data.jobs import worker  # noqa: PLW0406  # by its name, which pickled functions refer to

    worker.main()
