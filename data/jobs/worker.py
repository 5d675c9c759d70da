"""A worker process: `python -m data.jobs.worker FD PRELOAD`, started by `pool` alone."""

import importlib
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection


def main() -> None:
    """Run the tasks that come through the connection until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    pipe: Connection[object, object] = Connection(int(sys.argv[1]))
    importlib.import_module(sys.argv[2])  # while the parent is still planning

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        while True:
            task = pipe.recv()
            try:
                task.run(pipe.send)  # type: ignore[attr-defined]  # a pool.Task
                pipe.send(None)
            except (ValueError, OSError) as error:
                pipe.send(error)
            except Exception:
                pipe.send(RuntimeError(f"a worker process failed:\n{traceback.format_exc()}"))


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
