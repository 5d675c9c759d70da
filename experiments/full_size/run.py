"""Training with tables of 9.3 GB: `python -m experiments.full_size [--quick]`.

The job of `experiments.growth` with 35.6 million rows in 26 tables. In each round it trains once with
`cpr.PartialRecovery` and once under torchrun with full saves and loads by `torch.distributed.checkpoint`
(DCP), which take turns in coming first: a start, steps, a save during training, kill -9 of a worker; with CPR
also a lost node and a start from the save. Then this trainer and TorchRec's own DLRM take turns in training
steps. An interrupted command continues where it stopped. Figures, each a median over rounds, with extremes as
`..._low` and `..._high`:

- `big_rows`, `big_gb`: rows, and gigabytes of tables with their optimizer state.
- `big_kill_to_step_s`, `big_rival_kill_to_step_s`, `big_kill_ratio`: from the kill to the next step, and
  CPR's over DCP's. DCP's files are in the page cache from writing. `big_node_ratio`: a lost node over DCP's
  restart. `big_start_ratio`: the first start over that with DCP.
- `big_build_s`: of the model with its initial values. `big_build_ratio`: that over the time in which as many
  processes write the tables' bytes once into new shared memory.
- `big_save_gb_per_s`: of a rolling save during training, from its start to its commit;
  `big_rival_save_gb_per_s`: of DCP's, for which training waits.
- `big_memory_overhead`: peak of CPR's processes less that of TorchRec's before any save, over the tables.
- `big_step_ratio`: a step under CPR, whose tables are in shared memory, over one of the same model without.
- `big_ratio_to_torchrec`: samples/s of this trainer in fp32, in its faster setting of each round, over those
  of TorchRec's own DLRM in its fastest (one process with two threads or two with one; its pipeline).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from experiments.growth.axes import BASE, BIG, BIG_ROWS, NUM_TABLES
from experiments.growth.figures import GB, build_s
from experiments.growth.measure import measure
from experiments.harness.command import experiment_parser
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.statistics import median_figures
from experiments.harness.workload import OURS, TORCHREC, Setting, Workload
from experiments.recovery.picture import phase_bars
from experiments.throughput.run import launch, rates_by_round, ratios

ROUNDS: Final = 3
WORKLOAD: Final = Workload(rows=BIG_ROWS, warm_up_steps=30)
SETTINGS: Final = tuple(each for each in (*OURS, *TORCHREC) if each.precision == "fp32")
"""In fp32, as not every processor is faster in mixed precision."""
BARS: Final = {
    "first start: CPR": ("ours", "start"),
    "first start: torchrun, DCP": ("rival", "start"),
    "kill -9: CPR": ("ours", "kill"),
    "kill -9: torchrun, DCP": ("rival", "kill"),
    "lost node: CPR": ("ours", "node"),
}
"""Contender and moment of each bar of the picture."""
SCRATCH: Final = Path("runs") / "full_size"
"""Checkpoints, up to 19 GB, under the current folder; deleted after each measurement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    point, workload, scratch, rounds = BIG, WORKLOAD, SCRATCH, options.rounds
    if options.quick:
        small = replace(BASE, rows=400, steps_before=2, global_batch_size=64)
        point, scratch, rounds = replace(BIG, value=NUM_TABLES * 400, job=small), QUICK / "full_size", 1
        workload = Workload(rows=400, global_batch_size=64, warm_up_steps=2, steps=2)
    config = {"point": asdict(point), "workload": asdict(workload), "rounds": rounds}
    record = Record("full_size", config, seeds=[BASE.seed], quick=options.quick)
    for number in range(rounds):
        record.measure(f"job, round {number}", partial(measure, point, scratch, number))
        print(f"job, round {number}: stored", flush=True)
    for number in range(rounds):
        for setting in SETTINGS[:: -1 if number % 2 else 1]:
            key = f"step, round {number}: {setting.name}"
            record.measure(key, partial(_step, number, setting, workload))
            print(f"{key}: stored", flush=True)
    return record.publish(figures_of(record.rows), draw)


def _step(number: int, setting: Setting, workload: Workload) -> Row:
    return {"round": number, "setting": setting.name, **launch(setting, workload)}


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures of at least one round."""
    jobs = [row for row in rows if "ours" in row]
    found = {"big_rows": float(jobs[0]["value"]), "big_gb": jobs[0]["ours"]["table_bytes"] / GB}

    def add(name: str, of: Callable[[Row, Row], float]) -> None:
        found.update(median_figures(name, [of(row["ours"], row["rival"]) for row in jobs]))

    add("big_kill_to_step_s", lambda ours, _: total(ours["kill"]))
    add("big_rival_kill_to_step_s", lambda _, rival: total(rival["kill"]))
    add("big_kill_ratio", lambda ours, rival: total(ours["kill"]) / total(rival["kill"]))
    add("big_node_ratio", lambda ours, rival: total(ours["node"]) / total(rival["kill"]))
    add("big_start_ratio", lambda ours, rival: total(ours["start"]) / total(rival["start"]))
    add("big_build_s", lambda ours, _: build_s(ours["start"]))
    add("big_build_ratio", lambda ours, _: build_s(ours["start"]) / ours["write_s"])
    add("big_save_gb_per_s", lambda ours, _: save_gb_per_s(ours))
    add("big_rival_save_gb_per_s", lambda _, rival: save_gb_per_s(rival))
    add(
        "big_memory_overhead",
        lambda ours, rival: (ours["peak_bytes"] - rival["trained_bytes"]) / ours["table_bytes"],
    )
    add("big_step_ratio", lambda ours, rival: ours["step_s"] / rival["step_s"])
    return found | median_figures("big_ratio_to_torchrec", step_ratios(rows))


def draw(result: Row, folder: Path) -> None:
    """Draw a bar for each start and restart under both contenders."""
    jobs = [row for row in result["rows"] if "ours" in row]
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    phase_bars(axes, {text: [row[name][of] for row in jobs] for text, (name, of) in BARS.items()})
    axes.set_xlabel("seconds to the next step of all workers (bars: the median round)")
    figure.suptitle(f"2 workers with {result['figures']['big_gb']:.1f} GB of tables", fontsize=11)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(folder / "full_size.png", dpi=110)


def total(phases: Row) -> float:
    """Seconds of all phases."""
    return float(sum(phases.values()))


def save_gb_per_s(costs: Row) -> float:
    """Speed of a save until its commit."""
    return float(costs["save_bytes"] / costs["save_committed_s"] / GB)


def step_ratios(rows: Sequence[Row]) -> list[float]:
    """Rate of our fastest setting in each round over that of TorchRec's."""
    rounds = 1 + max(row["round"] for row in rows if "setting" in row)
    return ratios(rates_by_round(rows, rounds), {}, {})
