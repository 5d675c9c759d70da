"""What can go wrong with saved state, each error with a name that tells the caller what to do next."""


class CheckpointError(RuntimeError):
    """Saved state cannot be written or read; the message names the file, the cause and what to do."""


class CorruptFileError(CheckpointError):
    """A file is missing, truncated, or differs from its digest; readers fall back to an older state."""


class MismatchError(CheckpointError):
    """Saved state belongs to another run or another model; the message names the difference."""


class LockedError(CheckpointError):
    """Another run that is alive writes to this directory."""


class NoUsableStateError(CheckpointError):
    """No saved state verifies; the message lists each one with the reason."""


class SaveFailedError(CheckpointError):
    """A save in the background failed on some rank; nothing of it counts, older states are untouched."""
