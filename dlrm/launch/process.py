"""Exit codes and messages of a training process among many.

An error on one rank makes the others fail a moment later, in a collective, with errors that explain nothing.
So where all ranks find the same mistake, only rank 0 reports it at once, and other ranks wait a moment before
they report: when the rank that failed first exits, torchrun ends those that wait.
"""

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Final, NoReturn

from cpr.errors import CheckpointError, LockedError, MismatchError, ResidentMemoryError, RunStoppedError
from cpr.versions import IncompatiblePackagesError
from dlrm.launch.stop_signal import StopRequested, StopSignal

FAILED: Final = 1
USER_MISTAKE: Final = 2
SIGNALLED: Final = 128
MISTAKES: Final = (ValueError, IncompatiblePackagesError, MismatchError, LockedError)
LESS_MEMORY: Final = (
    "Lower data.global_batch_size, data.window_batches, model.embedding_dim or the widths of layers, or "
    "train with more ranks on more machines"
)
_NO_MEMORY: Final = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
FAILURES: Final = (OSError, CheckpointError, ResidentMemoryError, FloatingPointError, RunStoppedError)
"""Storage, saves, shared memory, a loss that is not a number, a run that restarts cannot help: one line is
enough."""

WAIT_WITHOUT_GROUP_S: Final = 10.0
"""Seconds that ranks other than 0 wait before reporting, without a process group: rank 0 finds the same
mistake."""
WAIT_S: Final = 2.0
"""Seconds that a failing rank waits before reporting, with a process group: another rank may have failed
first."""


def quiet_libraries() -> None:
    """Set log levels.

    This project's messages on rank 0, and libraries only for problems; repeat if ranks change.
    """
    first = _is_first()
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(logging.WARNING if first else logging.ERROR)
    for package in ("dlrm", "data", "cpr"):
        logging.getLogger(package).setLevel(logging.INFO if first else logging.ERROR)
    # each rank has a mirror of its own, of whose trouble no other one knows
    for of_each_rank in ("cpr.mirror", "data.stream"):
        logging.getLogger(of_each_rank).setLevel(logging.NOTSET if first else logging.WARNING)
    # libraries warn about choices that this project makes on purpose; TorchRec's planner uses the root logger
    logging.getLogger().addFilter(_is_no_planner_warning)
    for library in ("torchrec", "torch.fx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")
    warnings.filterwarnings("ignore", message=".*lookup_.*_ssd", category=DeprecationWarning)


def _is_no_planner_warning(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Sharding spec not found")


def exit_code_of(name: str, job: Callable[[StopSignal], None]) -> int:
    """Run `job` and turn the user's mistakes and signals into one line instead of a traceback.

    Args:
        name: of the program, for its messages.
        job: the work; SIGINT and SIGTERM stop it.

    Returns:
        0; 2 for a mistake of the user, a full disk or a lack of permissions; 1 for other failures of storage
        or saves, too little memory, or a loss that is NaN or infinite; 128 + signal number if stopped. Other
        errors are bugs and are raised.
    """
    # before `with stop`, Ctrl-C ends the process without a KeyboardInterrupt's traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop = StopSignal()
    try:
        with stop:
            job(stop)
    except StopRequested as request:
        return _stopped(name, request)
    except (*MISTAKES, *FAILURES) as error:
        return _failed(name, str(error), USER_MISTAKE if _is_for_the_user(error) else FAILED)
    except Exception as error:
        if _lacks_memory(error):
            cause = str(error).partition("\n")[0] or type(error).__name__
            return _failed(name, f"not enough memory ({cause}). {LESS_MEMORY}", FAILED)
        if stop.signum is not None:  # the other ranks got the signal too, and their collectives broke ours
            return _stopped(name, StopRequested(stop.signum))
        if os.environ.get("WORLD_SIZE", "1") != "1" and _is_peer_failure(error):
            time.sleep(WAIT_S)
        raise
    return 0


def _failed(name: str, message: str, code: int) -> int:
    if not _is_first():
        time.sleep(WAIT_S if _has_process_group() else WAIT_WITHOUT_GROUP_S)
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return code


def _is_for_the_user(error: Exception) -> bool:
    if isinstance(error, MISTAKES) or not isinstance(error, OSError):
        return isinstance(error, MISTAKES)
    from data.jobs.folder import FOR_THE_USER  # noqa: PLC0415  # pyarrow takes a second

    return error.errno in FOR_THE_USER


def _lacks_memory(error: Exception) -> bool:
    """Whether host or GPU memory ran out, for which PyTorch has no single exception type."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def leave(code: int) -> NoReturn:
    """End the process with a code from `exit_code_of`.

    A stopped process does not wait for threads that hang in storage, as the interpreter's exit would.
    """
    if code > SIGNALLED:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _stopped(name: str, request: StopRequested) -> int:
    if _is_first():
        print(f"{name}: {request}", file=sys.stderr, flush=True)
    return request.exit_code


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _is_peer_failure(error: Exception) -> bool:
    """Whether a collective failed, as it does on every rank after one of them has died."""
    distributed = sys.modules.get("torch.distributed")
    kinds = (distributed.DistError,) if distributed is not None and distributed.is_available() else ()
    return isinstance(error, (ConnectionError, *kinds)) or any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection closed by peer")
    )


def _has_process_group() -> bool:
    """Whether a process group exists, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()
