"""A worker of `experiments.uneven`: enters the control group of its rank and is `dlrm.train` then."""

import json
import os
from pathlib import Path
from typing import Final

from dlrm import train
from experiments.harness.processor_limits import Group

FOLDERS: Final = "CPR_UNEVEN_GROUPS"
"""Variable with the folders of the ranks' groups, as JSON."""


def main() -> int:
    """Train and return the exit code."""
    Group(Path(json.loads(os.environ[FOLDERS])[int(os.environ["RANK"])])).enter()
    train.prepare()
    return train.work()  # without a fork server, whose group would be another


if __name__ == "__main__":
    raise SystemExit(main())
