"""Whether the first restart works, again and again, with the plain command: rows of `experiments.recovery`.

Each time a small run of the trainer starts on two workers, one of them is killed at a seeded random moment,
and the run has to go on and to end by itself with this one restart.
"""

import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from cpr.faults import Killer, KillWorker
from data.synthetic import SyntheticConfig, generate
from experiments.harness.launch import running, torchrun_command
from experiments.harness.record import Row
from experiments.recovery.timing import wait_until

PROCESSES: Final = 2
DATASET: Final = SyntheticConfig(
    scale=1e-4, days=2, rows_per_day=120_000, rows_per_block=5000, rows_per_file=20_000
)
BATCH_SIZE: Final = 200
SETTLED_STEP: Final = 20
"""The kill comes after this step is done, within a seeded random time."""
WITHIN_S: Final = 2.0


class Restarts:
    """Starts runs and kills a worker of each.

    Args:
        scratch: for the data set and the runs; removed by its owner.
        seed: decides whom the kills hit, and when.
    """

    def __init__(self, scratch: Path, seed: int) -> None:
        self._scratch, self._seed = scratch.absolute(), seed

    def restart(self, number: int) -> Row:
        """One run; what became of it."""
        generate(DATASET, self._scratch / "dataset")  # once: it stays
        rng = random.Random(f"{self._seed} {number}")
        victim, after_s = rng.randrange(PROCESSES), rng.uniform(0, WITHIN_S)
        runs = self._scratch / f"runs-{number}"
        shutil.rmtree(runs, ignore_errors=True)
        command = torchrun_command("dlrm.train", self._arguments(runs), PROCESSES, restarts=3)
        with (
            tempfile.TemporaryFile("w+") as output,
            running(command, threads=1, output=output) as launcher,
            Killer(nodes=[launcher.pid]) as killer,
        ):
            wait_until(lambda: _has_done(runs, SETTLED_STEP), launcher, output)
            time.sleep(after_s)
            deed = killer.fire(KillWorker(), target=victim)
            code = launcher.wait()
        recoveries = _recoveries(runs)
        is_success = code == 0 and [each["kind"] for each in recoveries] == ["process"]
        seconds = sum(recoveries[0]["seconds"].values()) if is_success else None
        shutil.rmtree(runs)
        return {
            "success": is_success,
            "victim": victim,
            "killed": bool(deed.pids),
            "exit_code": code,
            "recoveries": [f"{each['kind']}: {each['reason']}" for each in recoveries],
            "seconds": seconds,
        }

    def _arguments(self, runs: Path) -> list[str]:
        return [
            "--recipe",
            "tiny",
            "--set",
            f"data.uri={self._scratch / 'dataset'}",
            f"data.global_batch_size={BATCH_SIZE}",
            f"train.run_folder={runs}",
            "train.device=cpu",
            "train.evaluate_every_steps=0",
            "train.log_every_steps=10",
            "checkpoint.every_steps=100",
        ]


def _has_done(runs: Path, step: int) -> bool:
    return any(f'"step": {step},' in path.read_text() for path in runs.glob("*/metrics.jsonl"))


def _recoveries(runs: Path) -> list[Row]:
    reports = [json.loads(path.read_text()) for path in runs.glob("*/report.json")]
    return list(reports[0]["failures"]["recoveries"]) if len(reports) == 1 else []
