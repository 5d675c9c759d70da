"""Kills a worker in the middle of training and shows that training continues: `make demo`.

The demo trains the `tiny` recipe on two workers under plain torchrun, kills one of them with -9 half way,
lets the run end by itself, and prints what happened. `experiments.recovery` measures how fast that is.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

from cpr.faults import Killer, KillWorker
from cpr.recovery.run.report import PHASES, Recovery
from experiments.harness.launch import torchrun_command, worker_environment

RUNS: Final = Path("runs") / "demo"
VICTIM: Final = 1
KILL_STEP: Final = 500
POLL_S: Final = 0.05
SETTINGS: Final = ("checkpoint.every_steps=100", "train.evaluate_every_steps=0", "train.device=cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code of its run."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--dataset", type=Path, default=Path("datasets/tiny"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    # the killer warns of what it does, which is said below; `force`: an import has configured logging already
    logging.basicConfig(format="%(message)s", level=logging.ERROR, force=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    before = set(RUNS.iterdir())
    settings = [*SETTINGS, f"data.uri={options.dataset}", f"train.run_folder={RUNS}"]
    run = ["--recipe", "tiny", "--set", *settings]
    command = torchrun_command("dlrm.train", run, processes=2, restarts=3)
    _say("Two workers train: torchrun --nproc-per-node 2 --max-restarts 3 -m dlrm.train --recipe tiny ...")
    with tempfile.TemporaryFile("w+") as output:
        launcher = subprocess.Popen(
            command, env=worker_environment(threads=1), stdout=output, stderr=subprocess.STDOUT
        )
        try:
            folder = _wait_for_step(launcher, before)
            with Killer(nodes=[launcher.pid]) as killer:
                deed = killer.fire(KillWorker(), target=VICTIM)
            _say(f"Step {KILL_STEP} is done. kill -9 {deed.pids[0]}: that was the worker with rank {VICTIM}.")
            code = launcher.wait()
        finally:
            launcher.terminate()
            launcher.wait()
        if code:
            output.seek(0)
            print(output.read()[-4000:], file=sys.stderr)
            return code
    _tell(json.loads((folder / "report.json").read_text()))
    return 0


def _wait_for_step(launcher: "subprocess.Popen[bytes]", before: set[Path]) -> Path:
    """Wait until `KILL_STEP` is done, and return the run's folder."""
    while launcher.poll() is None:
        for folder in set(RUNS.iterdir()) - before:
            metrics = folder / "metrics.jsonl"
            if metrics.exists() and f'"step": {KILL_STEP},' in metrics.read_text():
                return folder
        time.sleep(POLL_S)
    raise RuntimeError(f"the run ended before step {KILL_STEP}")


def _tell(report: dict[str, Any]) -> None:
    (recovery,) = (Recovery.from_dict(each) for each in report["failures"]["recoveries"])
    for ending in recovery.dead:
        _say(f"Ended: {shorten(str(ending), 110, placeholder=' ...')}")
    kept = sum(origin.adopted for origin in recovery.sources)
    lost = sum(origin.lost for origin in recovery.sources)
    _say(
        f"torchrun started both again. {kept:,} rows of the tables were still in memory, the dead worker's "
        f"too; {lost:,} came from the checkpoint, of which {recovery.bytes_read:,} bytes were read."
    )
    interrupted = ", whose next batch was interrupted and is left out" if recovery.interrupted else ""
    _say(f"Training continued from step {recovery.step}{interrupted}.")
    phases = [f"{phase} {recovery.seconds[phase]:.2f}" for phase in PHASES if phase in recovery.seconds]
    _say(
        f"Seconds from the kill to the next step: {sum(recovery.seconds.values()):.1f} ({', '.join(phases)})."
    )
    _say(f"Portion of lost samples (PLS): {report['failures']['pls']:g}.")
    _say(
        f"After {report['steps']} steps the AUC is {report['metrics']['auc']:.4f}; the best that any model "
        f"can reach on this data is {report['best_auc']:.4f}."
    )
    _say(f"Everything about the run is in {report['run_folder']}.")


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
