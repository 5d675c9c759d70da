"""The trainer with a witness (`recovery_soak.witness`); started by torchrun, not by people.

It takes the trainer's command line. The folder of the witness's logs is named by `CPR_WITNESS`.
"""

from unittest.mock import patch

from cpr import forkserver as standby
from dlrm import train
from dlrm.launch.malloc import ask_for_huge_pages
from dlrm.launch.process import leave


def prepare() -> None:
    """Import everything."""
    train.prepare()
    import experiments.recovery_soak.witnessed  # noqa: F401, PLC0415  # torch: not before it is needed


def work() -> int:
    """Train; the exit code."""
    from experiments.recovery_soak.witnessed import WitnessedRecovery  # noqa: PLC0415

    with patch("dlrm.fault_tolerance.setup.PartialRecovery", WitnessedRecovery):
        return train.work()


if __name__ == "__main__":
    ask_for_huge_pages()
    leave(standby.run(prepare, work))
