"""CPR: fault tolerance for TorchRec models whose embedding tables are sharded over many workers.

It works on any `DistributedModelParallel` model and never imports the trainer that comes with it.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cpr.checkpoint.config import CheckpointConfig
    from cpr.estimator.planning.interval import IntervalRule
    from cpr.priority.config import PriorityConfig
    from cpr.recovery.run.policy import RecoveryPolicy
    from cpr.session import PartialRecovery

__all__ = ["CheckpointConfig", "IntervalRule", "PartialRecovery", "PriorityConfig", "RecoveryPolicy"]

_HOMES: Final = {
    "CheckpointConfig": "cpr.checkpoint.config",
    "IntervalRule": "cpr.estimator.planning.interval",
    "PartialRecovery": "cpr.session",
    "PriorityConfig": "cpr.priority.config",
    "RecoveryPolicy": "cpr.recovery.run.policy",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: most of `cpr` needs neither torch nor TorchRec."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cpr' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(_HOMES[name]), name)
