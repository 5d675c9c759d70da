"""Half an hour of training, a failure about every minute: `python -m experiments.recovery_soak [--quick]`.

The `tiny` recipe on two nodes of this machine, two workers each, every node a `cpr run` with its torchrun.
The data set is as large as half an hour of training needs, measured first. Two runs train at the same time:
one undisturbed, and one with failures at seeded random moments, all kinds mixed: workers killed with and
without their memory, agents killed with and without their workers, whole nodes lost, nodes cut off from the
network, nodes paused as a whole, hangs that pass and hangs that do not, exceptions in a step, slow workers,
damaged checkpoint files, storage that fails once, and storage outages. Pauses and partitions are shorter and
longer than the timeout of collectives. A node that is cut off for long is replaced by a spare: when its link
is healed, it waits with its outdated memory, and takes its place back when the spare is retired. The last
time it returns when the others have finished. Partitions need network namespaces, which need root and
iproute2; without, they are left out. Interrupted, the command starts both runs again; after a failure it
leaves the runs' folders in `runs/` until it is started again.

In the disturbed run all rows are compared with independent logs after each recovery and in the last save
(`experiments.recovery_soak.verdict` says how, and what that does not cover). That makes its steps longer.
Figures:

- `soak_failures`: failures that happened; `soak_lost_nodes`, `soak_partitions`, `soak_pauses` and
  `soak_outages`: those of them in which a node was lost with all its memory, was cut off, or was paused as a
  whole, and in which storage was out for a while; `soak_replacements`: nodes that were replaced while they
  were cut off, and returned.
- `soak_auc_delta`: AUC on the test day after the disturbed run, minus that after the undisturbed one.
- `soak_rows_wrong`: rows, over all recoveries and the last save, that were not what they had to be.
- `soak_rows_checked`: rows that were compared; `soak_rows_unchecked`: rows that were not, because they had
  changed in a batch that was interrupted, or no log had their values.
- `soak_pls`: portion of lost samples of the disturbed run, as it reports it itself.
- `soak_nodes_failed`: nodes that did not end by themselves, with exit code 0, after the end of training.
- `soak_leftovers`: processes, files and folders in shared memory, temporary files, folders of `cpr run` and
  network namespaces that it left behind.
- `soak_minutes`, `soak_minutes_undisturbed`: from start to end; `soak_recoveries`: restarts of the workers.

Each node keeps a mirror of the other's rows. With `--lost-nodes`, the only failures are nodes that are lost
with their memory, one each minute. Then the result is `lost_nodes`, with the figures `mirror_losses` (of
nodes), `mirror_pls`, `mirror_steps_lost` (the same as steps of the lost node for each loss),
`mirror_rows_wrong`, `mirror_auc_delta`, `mirror_batches_skipped`, `mirror_recoveries`, `mirror_minutes`, and
`mirror_exact`: recoveries that went on from one step that all had, without PLS or a batch skipped.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from cpr.faults import Deed, Killer, LoseNode, Partition, PauseNode, Plan, StorageOutage
from cpr.recovery.run.report import LIVE
from data.synthetic import SyntheticConfig, generate
from experiments.harness.command import experiment_parser
from experiments.harness.network import Network, NoNetworkError, check_possible
from experiments.harness.record import QUICK, Record, Row
from experiments.recovery.launch import NODES, NodesRun
from experiments.recovery_soak.failures import Replacements, lost_nodes, plans
from experiments.recovery_soak.verdict import Counts, check_save
from experiments.recovery_soak.witness import History
from experiments.recovery_soak.witnessed import CHECKS, FOLDER

WORKERS_PER_NODE: Final = 2
DAYS: Final = 20
"""The last is the test day."""
DISTURBED_SHARE: Final = 0.4
"""Share of the machine's training speed that the disturbed run is expected to reach: it has half of the
machine, and loses its downtime."""
LAST_REPLACED: Final = 0.9
"""Share of the steps after which a node is replaced that is not back before the end."""
PATIENCE: Final = 4
"""A run that takes this many times as long as planned, and more than `LEAST_S`, has failed."""
LEAST_S: Final = 300.0
SCRATCH: Final = Path("runs") / "recovery-soak"
"""Data set, runs, their checkpoints and logs, up to 5 GB, under the current folder; deleted at
the end."""
ROWS: Final = tuple(each.name for each in fields(Counts) if each.name != "problem")

STORED: Final = ("kind", "reason", "step", "mirror_step", "interrupted", "pls_added", "seconds")
"""What is stored of each recovery."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Length and settings of the disturbed run."""

    lost_nodes: bool = False
    """Whether nodes that are lost are the only failures."""

    minutes: float = 30.0
    """Length of the disturbed run, about."""
    mean_s: float = 60.0
    """Mean time between failures."""
    global_batch_size: int = 512
    save_every_s: float = 10.0
    """Converted to steps at the undisturbed pace."""
    collective_timeout_s: float = 30.0
    replaced_at: float = 0.4
    """When a node is cut off and replaced, as a share of `minutes`."""
    away_s: float = 90.0
    """How long the node is cut off."""
    replaced_for_s: float = 180.0
    """How long the spare has the node's place, or waits for it."""
    seed: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both runs and store how they ended."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=Soak.minutes, help=f"default {Soak.minutes:g}")
    parser.add_argument("--lost-nodes", action="store_true", help="no other failures than lost nodes")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    soak = Soak(minutes=options.minutes)
    if options.lost_nodes:
        soak = replace(soak, lost_nodes=True)
    if options.quick:
        soak = replace(
            soak,
            minutes=0.6,
            save_every_s=1.0,
            collective_timeout_s=10.0,
            away_s=20.0,
            replaced_for_s=28.0,
        )
    no_network = "only nodes are lost" if soak.lost_nodes else _why_no_network()
    config = {**asdict(soak), "partitions": no_network is None}
    module = "recovery_soak"
    name = "lost_nodes" if soak.lost_nodes else module
    record = Record(name, config, seeds=[soak.seed], quick=options.quick, module=module)
    scratch = QUICK / name if options.quick else SCRATCH / name
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that failed or was killed
    pace_of = partial(_pace, scratch / "pace", rows=50_000 if options.quick else 200_000)
    pace = record.measure("pace", pace_of)["samples_per_s"]
    dataset = _dataset(soak, pace, scratch / "dataset")
    disturbed = partial(
        _disturbed,
        faults=lost_nodes(soak.minutes, soak.seed, options.quick)
        if soak.lost_nodes
        else plans(soak.mean_s, soak.seed, options.quick, no_network is None),
        has_network=no_network is None,
    )
    runs: dict[str, Callable[[Soak, float, Path, Path], Row]]
    runs = {"undisturbed": _undisturbed, "disturbed": disturbed}
    with ThreadPoolExecutor(len(runs)) as pool:
        both = {key: pool.submit(run, soak, pace, dataset, scratch) for key, run in runs.items()}
        calm, rough = (record.measure(key, run.result) for key, run in both.items())
    shutil.rmtree(scratch, ignore_errors=True)
    notes = {}
    if soak.lost_nodes:
        path = record.finish(_figures_of_mirrors(calm, rough))
        print(f"stored in {path}")
        return 0
    if no_network is not None:
        names = ("soak_partitions", "soak_replacements")
        notes = dict.fromkeys(names, f"partitions were left out: {no_network}")
    path = record.finish(_figures(calm, rough, no_network is None), notes)
    print(f"stored in {path}")
    return 0


def _figures(calm: Row, rough: Row, has_network: bool) -> dict[str, float | None]:
    happened = [each["kind"] for each in rough["failures"] if each["happened"]]
    rows = {name: sum(check[name] for check in rough["checks"]) for name in ROWS}
    return {
        "soak_failures": len(happened),
        "soak_lost_nodes": happened.count(LoseNode.name),
        "soak_partitions": happened.count(Partition.name) if has_network else None,
        "soak_pauses": happened.count(PauseNode.name),
        "soak_outages": happened.count(StorageOutage.name),
        "soak_replacements": rough["replacements"] if has_network else None,
        "soak_nodes_failed": rough["nodes_failed"],
        "soak_auc_delta": rough["auc"] - calm["auc"],
        "soak_rows_wrong": rows["rows_wrong"],
        "soak_rows_checked": rows["rows"] - rows["rows_interrupted"] - rows["rows_unknown"],
        "soak_rows_unchecked": rows["rows_interrupted"] + rows["rows_unknown"],
        "soak_pls": rough["pls"],
        "soak_leftovers": sum(rough["leftovers"].values()),
        "soak_recoveries": len(rough["recoveries"]),
        "soak_minutes": rough["minutes"],
        "soak_minutes_undisturbed": calm["minutes"],
    }


def _figures_of_mirrors(calm: Row, rough: Row) -> dict[str, float | None]:
    recoveries, losses = rough["recoveries"], sum(each["happened"] for each in rough["failures"])
    exact = [each for each in recoveries if each["kind"] in LIVE and not each["pls_added"]]
    return {
        "mirror_losses": losses,
        "mirror_pls": rough["pls"],
        "mirror_steps_lost": rough["pls"] * NODES * rough["steps"] / max(1, losses),
        "mirror_rows_wrong": sum(check["rows_wrong"] for check in rough["checks"]),
        "mirror_auc_delta": rough["auc"] - calm["auc"],
        "mirror_batches_skipped": sum(each["interrupted"] for each in recoveries),
        "mirror_recoveries": len(recoveries),
        "mirror_minutes": rough["minutes"],
        "mirror_exact": len([each for each in exact if not each["interrupted"]]),
    }


def _why_no_network() -> str | None:
    """Why links cannot be cut on this machine; None if they can."""
    try:
        check_possible()
    except NoNetworkError as error:
        return str(error)
    return None


def _dataset(soak: Soak, pace: float, folder: Path) -> Path:
    """Generate data for the whole run at `pace`, samples/s."""
    generate(SyntheticConfig(days=DAYS, rows_per_day=_rows(soak, pace)), folder, processes=2)
    return folder


def _rows(soak: Soak, pace: float) -> int:
    """Rows of each day."""
    return max(1000, int(soak.minutes * 60 * DISTURBED_SHARE * pace / (DAYS - 1)))


def _arguments(soak: Soak, pace: float, dataset: Path) -> list[str]:
    every = max(10, round(soak.save_every_s * pace / soak.global_batch_size))
    return [
        "--recipe",
        "tiny",
        "--set",
        f"data.uri={dataset.absolute()}",
        f"data.global_batch_size={soak.global_batch_size}",
        "train.device=cpu",
        "train.evaluate_every_steps=0",
        "train.log_every_steps=20",
        f"checkpoint.every_steps={every}",
        f"recovery.timeout_s={soak.collective_timeout_s}",
        "mirror.to=neighbour",
    ]


def _pace(scratch: Path, rows: int) -> Row:
    """Samples/s of an undisturbed run."""
    generate(SyntheticConfig(days=2, rows_per_day=rows), scratch / "dataset", processes=2)
    arguments = _arguments(Soak(), Soak.global_batch_size * 20, scratch / "dataset")
    with NodesRun(scratch / "run", arguments, WORKERS_PER_NODE) as run:
        return {"samples_per_s": run.wait(600)["samples_per_s"]}


def _undisturbed(soak: Soak, pace: float, dataset: Path, scratch: Path) -> Row:
    arguments = _arguments(soak, pace, dataset)
    began = time.monotonic()
    with NodesRun(scratch / "undisturbed", arguments, WORKERS_PER_NODE) as run:
        report = run.wait(max(LEAST_S, PATIENCE * soak.minutes * 60))
        return _outcome(report, began) | {"leftovers": asdict(run.leftovers())}


def _disturbed(
    soak: Soak, pace: float, dataset: Path, scratch: Path, faults: tuple[Plan, Plan], has_network: bool
) -> Row:
    arguments = _arguments(soak, pace, dataset)
    witness = scratch / "witness"
    witness.mkdir()
    environment = {FOLDER: str(witness.absolute())}
    if faults[0].schedules:
        inside = scratch / "faults.json"
        inside.write_text(json.dumps(faults[0].to_json()))
        environment["CPR_FAULTS"] = str(inside.absolute())
    began = time.monotonic()
    with (
        Network(NODES + 1) if has_network else nullcontext() as network,
        NodesRun(
            scratch / "disturbed",
            arguments,
            WORKERS_PER_NODE,
            module="experiments.recovery_soak.worker",
            environment=environment,
            network=network,
        ) as run,
    ):
        checkpoint = run.wait_for_folder() / "checkpoint"
        with (
            Killer(faults[1], nodes=run.nodes, checkpoint=checkpoint) as killer,
            Replacements(
                run,
                killer,
                at_s=soak.replaced_at * soak.minutes * 60,
                away_s=soak.away_s,
                replaced_for_s=soak.replaced_for_s,
                last_step=int(LAST_REPLACED * _rows(soak, pace) * (DAYS - 1) / soak.global_batch_size),
            )
            if has_network
            else nullcontext() as replacements,
        ):
            report = run.wait(max(LEAST_S, PATIENCE * soak.minutes * 60))
        failed, leftovers = run.failed_nodes(), asdict(run.leftovers())
    return _outcome(report, began) | {
        "failures": [_row_of(deed) for deed in killer.deeds] + _injected(run.run_folder),
        "replacements": replacements.done if replacements else 0,
        "nodes_failed": failed,
        "checks": _checks(witness, checkpoint, report["steps"]),
        "leftovers": leftovers | {"namespaces": len(network.left()) if network else 0},
    }


def _checks(witness: Path, checkpoint: Path, steps: int) -> list[Row]:
    """The checks of every recovery and worker, and of the last save; wrong rows are logged."""
    lines = (witness / CHECKS).read_text().splitlines()
    checks: list[Row] = [json.loads(line) for line in lines]
    checks.append(
        {"kind": "end", "step": steps, **asdict(check_save(History(witness), str(checkpoint), steps))}
    )
    for check in checks:
        if check["rows_wrong"]:
            logger.warning("wrong rows: %s", check)
    return checks


def _outcome(report: dict[str, Any], began: float) -> Row:
    failures = report["failures"]
    return {
        "auc": report["metrics"]["auc"],
        "best_auc": report["best_auc"],
        "steps": report["steps"],
        "samples": report["samples"],
        "pls": failures["pls"],
        "recoveries": [{name: each[name] for name in STORED} for each in failures["recoveries"]],
        "minutes": (time.monotonic() - began) / 60,
    }


def _row_of(deed: Deed) -> Row:
    """The row of a failure from outside."""
    return {"kind": deed.kind.name, "after_s": deed.after_s, "happened": deed.happened, "note": deed.note}


def _injected(folder: Path) -> list[Row]:
    """Rows of the failures that workers injected into themselves, from the injector's record."""
    lines = [
        line for path in folder.glob("checkpoint/faults-*.jsonl") for line in path.read_text().splitlines()
    ]
    claimed = [json.loads(line) for line in lines]
    return [
        {"kind": each["kind"]["kind"], "step": each["step"], "happened": True, "note": ""}
        for each in claimed
        if "kind" in each
    ]
