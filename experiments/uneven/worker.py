"""A worker of `experiments.uneven`: enters the control group of its rank and is `dlrm.train` then.

With `TIMES`, dynamic batching is switched off and on by turns, see `switched`.
"""

import json
import os
from pathlib import Path
from typing import Final

from dlrm import train
from dlrm.training import build
from experiments.harness.processor_limits import Group
from experiments.uneven.switched import SwitchedBatching

FOLDERS: Final = "CPR_UNEVEN_GROUPS"
"""Variable with the folders of the ranks' groups, as JSON."""
TIMES: Final = "CPR_UNEVEN_TIMES"
"""Variable with the file for the times of a run in which batching is switched off and on."""


def main() -> int:
    """Train and return the exit code."""
    Group(Path(json.loads(os.environ[FOLDERS])[int(os.environ["RANK"])])).enter()
    if times := os.environ.get(TIMES):
        SwitchedBatching.path = Path(times)
        build.DynamicBatching = SwitchedBatching  # type: ignore[attr-defined]
    train.prepare()
    return train.work()  # without a fork server, whose group would be another


if __name__ == "__main__":
    raise SystemExit(main())
