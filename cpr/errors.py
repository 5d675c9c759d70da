"""Errors of saved and resident state; the name of each tells the caller what to do next."""


def is_failure(error: BaseException | None) -> bool:
    """Whether a block that ends with `error` has failed; None is a normal end.

    `sys.exit()` with code 0 or None, and the end of a generator, are normal ends. A generator closed while
    another exception is handled has failed with its caller.
    """
    if isinstance(error, SystemExit):
        return not (error.code is None or (isinstance(error.code, int) and error.code == 0))
    if isinstance(error, GeneratorExit):
        return error.__context__ is not None
    return error is not None


class CheckpointError(RuntimeError):
    """Saved state cannot be written or read; the message names the file, the cause and what to do."""


class CorruptFileError(CheckpointError):
    """A file is missing, truncated, or differs from its digest; readers fall back to an older state."""


class MismatchError(CheckpointError):
    """Saved state belongs to another run or another model; the message names the difference."""


class LockedError(CheckpointError):
    """Another live run writes to this directory."""


class SupersededError(LockedError):
    """A newer run owns this directory; this run can never save to it again."""


class NoUsableStateError(CheckpointError):
    """No saved state verifies; the message lists each one with the reason."""


class NothingSavedError(NoUsableStateError):
    """A checkpoint directory contains no save at all."""


class SaveFailedError(CheckpointError):
    """A background save failed on some rank; it does not count, and older states are intact."""


class SaveGivenUpError(SaveFailedError):
    """A save took longer than its caller allowed; it does not count, and storage has not failed."""


class SaveRefusedError(SaveFailedError):
    """A save was refused, as a newer run owns the directory; retries are useless."""


class ResidentMemoryError(RuntimeError):
    """Shared memory that survives workers cannot be used; the message names the place and the cause."""


class NotEnoughMemoryError(ResidentMemoryError):
    """The shared memory file system is too small; the message tells what to change."""


class DamagedMemoryError(ResidentMemoryError):
    """Shared memory is damaged, or belongs to another run: it must not be used."""


class UnreadableMemoryError(ResidentMemoryError):
    """Shared memory cannot be read now, but may be intact: it is kept; the message tells what to do."""


class MemoryVersionError(UnreadableMemoryError):
    """Shared memory was written by another version of this program, which can read it: it is kept."""


class RendezvousError(RuntimeError):
    """Workers did not complete the rendezvous in time; the message names the missing ranks."""


class RecoveryError(RuntimeError):
    """The workers of a run cannot continue together; the message tells why and what to do."""


class RunStoppedError(RecoveryError):
    """The run stops on all ranks, as restarted workers would end the same way; `cpr run` stops as well.

    The first line of the message is the cause. Restarted workers raise this again, and tell it in short.
    """


class NoProgressError(RunStoppedError):
    """Several generations of workers died without finishing a step; lists the cause of each."""


class AlreadyFinishedError(CheckpointError):
    """The run of a directory has finished, and its late workers must not take the directory again.

    Args:
        step: training steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class RunFinished(SystemExit):
    """The run that a restarted worker would continue has finished: the process ends with exit code 0.

    Args:
        step: training steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step


class StartOverError(RecoveryError):
    """Resident memory was unusable before the first save; restarted workers start over."""
