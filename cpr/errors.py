"""What can go wrong with saved or resident state; each error's name tells the caller what to do next."""


def is_failure(error: BaseException | None) -> bool:
    """Whether a block that is left by `error` has failed; None: it was left normally.

    `sys.exit()` with code 0 or none and the end of a generator are ways to return. A generator that is closed
    while another exception is handled has failed with its caller.
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
    """Another run that is alive writes to this directory."""


class SupersededError(LockedError):
    """A newer run owns this directory; nothing of this one will ever be saved there again."""


class NoUsableStateError(CheckpointError):
    """No saved state verifies; the message lists each one with the reason."""


class NothingSavedError(NoUsableStateError):
    """Nothing was ever saved there."""


class SaveFailedError(CheckpointError):
    """A save in the background failed on some rank; nothing of it counts, older states are untouched."""


class SaveGivenUpError(SaveFailedError):
    """A save took longer than its caller allowed; it does not count, and the storage is not to blame."""


class SaveRefusedError(SaveFailedError):
    """A newer run owns the directory: there is no use in trying again."""


class ResidentMemoryError(RuntimeError):
    """Shared memory that outlives a worker cannot be used; the message names the place and the cause."""


class NotEnoughMemoryError(ResidentMemoryError):
    """The shared memory file system is too small; the message names what to change."""


class DamagedMemoryError(ResidentMemoryError):
    """Shared memory is proven not to be what its owner left, or somebody else's: none of it may be used."""


class UnreadableMemoryError(ResidentMemoryError):
    """Shared memory cannot be read now, and may be whole: it is kept; the message says what to do."""


class MemoryVersionError(UnreadableMemoryError):
    """Shared memory was written by another version of this program, which can read it: it is kept."""


class RendezvousError(RuntimeError):
    """The workers of a run did not find each other in time; the message names who is missing."""


class RecoveryError(RuntimeError):
    """The workers of a run cannot go on together; the message says why and what to do."""


class NoProgressError(RecoveryError):
    """Generations of workers died one after the other without finishing a step; lists what each died of."""


class DivergedRunError(RecoveryError, FloatingPointError):
    """Workers left because values were no numbers; whoever is started in their place does not go on."""


class RunFinished(SystemExit):
    """The run that a restarted worker would continue has reached its end: the process ends with exit code 0.

    Args:
        step: training steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(0)
        self.step = step


class StartOverError(RecoveryError):
    """Live memory turned out to be of no use before anything was saved; restarted workers begin anew."""
