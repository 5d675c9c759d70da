"""A training process towards the outside: what it says, and with which code it ends.

One process of many must not drown the message of another. What goes wrong on one rank makes the others
fail a moment later, in a collective, with errors that say nothing. So rank 0 speaks at once where all ranks
know the same, and everybody else waits a moment first: when the rank that failed has gone, torchrun ends
those that wait.
"""

import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Final, NoReturn

from cpr.errors import CheckpointError, LockedError, MismatchError, NoProgressError
from dlrm.launch.stop_signal import StopRequested, StopSignal
from dlrm.launch.versions import IncompatiblePackagesError

FAILED: Final = 1
USER_MISTAKE: Final = 2
SIGNALLED: Final = 128
MISTAKES: Final = (ValueError, IncompatiblePackagesError, MismatchError, LockedError)
LESS_MEMORY: Final = (
    "Lower data.global_batch_size, data.window_batches, model.embedding_dim or the widths of layers, or "
    "train with more ranks on more machines"
)
_NO_MEMORY: Final = ("can't allocate memory", "Storage size calculation overflowed", "out of memory")
FAILURES: Final = (OSError, CheckpointError, FloatingPointError, NoProgressError)
"""Storage, saves, a loss that is not a number, workers that die again and again: the message is enough."""

WAIT_BEFORE_MEETING_S: Final = 10.0
"""How long another rank than 0 leaves the word to rank 0, which will find the same mistake."""
WAIT_S: Final = 2.0
"""How long a failing process leaves the word to the rank that failed first, once they have met."""


def quiet_libraries() -> None:
    """Let this project speak on rank 0, and libraries only where it matters. Again, when ranks change."""
    first = _is_first()
    logging.basicConfig(format="%(message)s")
    logging.getLogger().setLevel(logging.WARNING if first else logging.ERROR)
    for ours in ("dlrm", "data", "cpr"):
        logging.getLogger(ours).setLevel(logging.INFO if first else logging.ERROR)
    # the libraries warn of choices that are meant, TorchRec's planner through the root logger
    logging.getLogger().addFilter(_is_no_warning_of_a_choice)
    for theirs in ("torchrec", "torch.fx"):
        logging.getLogger(theirs).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec")
    warnings.filterwarnings("ignore", message=".*lookup_.*_ssd", category=DeprecationWarning)


def _is_no_warning_of_a_choice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Sharding spec not found")


def exit_code_of(name: str, job: Callable[[StopSignal], None]) -> int:
    """Run `job` and turn the user's mistakes and wishes into one line instead of a traceback.

    Args:
        name: of the program, for its messages.
        job: what to do; it is stopped by SIGINT and SIGTERM.

    Returns:
        0; 2 for a mistake of the user; 1 for storage or saves that failed, too little memory and a loss that
        is no number; 128 + number of the signal that stopped it. Other errors, which can only be ours, are
        raised.
    """
    # Outside the listening below these end the process at once, without a KeyboardInterrupt's traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stop = StopSignal()
    try:
        with stop:
            job(stop)
    except StopRequested as request:
        return _stopped(name, request)
    except (*MISTAKES, *FAILURES) as error:
        return _failed(name, str(error), USER_MISTAKE if isinstance(error, MISTAKES) else FAILED)
    except Exception as error:
        if _lacks_memory(error):
            cause = str(error).partition("\n")[0] or type(error).__name__
            return _failed(name, f"not enough memory ({cause}). {LESS_MEMORY}", FAILED)
        if stop.signum is not None:  # the other ranks were told too, and have left their collectives
            return _stopped(name, StopRequested(stop.signum))
        if os.environ.get("WORLD_SIZE", "1") != "1" and _is_of_a_peer(error):
            time.sleep(WAIT_S)
        raise
    return 0


def _failed(name: str, message: str, code: int) -> int:
    if not _is_first():
        time.sleep(WAIT_S if _have_met() else WAIT_BEFORE_MEETING_S)
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return code


def _lacks_memory(error: Exception) -> bool:
    """Whether there is less memory than asked for, on the host or on a GPU; PyTorch has no type for all."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def leave(code: int) -> NoReturn:
    """End the process with `code` from `exit_code_of`.

    A process that was stopped does not wait for threads that hang in storage, as the interpreter would.
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


def _is_of_a_peer(error: Exception) -> bool:
    """Whether an exchange failed, as it does on every rank when one of them has died or failed."""
    distributed = sys.modules.get("torch.distributed")
    kinds = (distributed.DistError,) if distributed is not None and distributed.is_available() else ()
    return isinstance(error, (ConnectionError, *kinds)) or any(
        word in str(error).lower() for word in ("gloo", "nccl", "connection closed by peer")
    )


def _have_met() -> bool:
    """Whether there is a process group, without importing torch for the answer."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()
