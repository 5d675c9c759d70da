"""The trainer with independent logs (`recovery_soak.witness`), as torchrun starts it for the soak.

It takes the trainer's command line. `CPR_WITNESS` names the folder of the logs.
"""

from unittest.mock import patch

from cpr import forkserver
from dlrm import train
from dlrm.launch.malloc import ask_for_huge_pages
from dlrm.launch.process import leave


def prepare() -> None:
    """Import everything, once for all forks."""
    train.prepare()
    import experiments.recovery_soak.witnessed  # noqa: F401, PLC0415  # torch: not before it is needed


def work() -> int:
    """Train; the exit code."""
    from experiments.recovery_soak.witnessed import WitnessedRecovery  # noqa: PLC0415

    with patch("dlrm.fault_tolerance.setup.PartialRecovery", WitnessedRecovery):
        return train.work()


if __name__ == "__main__":
    ask_for_huge_pages()
    leave(forkserver.run(prepare, work))
