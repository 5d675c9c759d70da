"""CPR: fault tolerance for TorchRec models whose embedding tables are sharded over many workers.

The package works on any `DistributedModelParallel` model and never imports the trainer that comes with it.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cpr.checkpoint.checkpointer import Checkpointer
    from cpr.checkpoint.config import CheckpointConfig
    from cpr.checkpoint.state.changes import Changes
    from cpr.estimator.planning.interval import IntervalRule
    from cpr.mirror.config import MirrorConfig
    from cpr.priority.config import PriorityConfig
    from cpr.recovery.decide.assessment import RecoveryPolicy
    from cpr.session import PartialRecovery

    __version__: str

__all__ = [
    "Changes",
    "CheckpointConfig",
    "Checkpointer",
    "IntervalRule",
    "MirrorConfig",
    "PartialRecovery",
    "PriorityConfig",
    "RecoveryPolicy",
    "__version__",
]

_HOMES: Final = {
    "Changes": "cpr.checkpoint.state.changes",
    "CheckpointConfig": "cpr.checkpoint.config",
    "Checkpointer": "cpr.checkpoint.checkpointer",
    "IntervalRule": "cpr.estimator.planning.interval",
    "MirrorConfig": "cpr.mirror.config",
    "PartialRecovery": "cpr.session",
    "PriorityConfig": "cpr.priority.config",
    "RecoveryPolicy": "cpr.recovery.decide.assessment",
}


def __getattr__(name: str) -> Any:
    """Import names on first use, because most of `cpr` needs neither torch nor TorchRec."""
    from importlib import import_module, metadata  # noqa: PLC0415

    if name == "__version__":
        try:
            return metadata.version("cpr-trainer")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "0+unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'cpr' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
