"""What failures cost on 1 to 10,000 nodes: `python -m experiments.scaling [--quick]`.

Overhead of both recoveries, by the paper's formulas and simulated. The job is the one that gives the paper's
overheads on Criteo Kaggle: 56 h, on 8 nodes a failure every 28 h, a save of 5.6 min, recoveries of 5.4 min,
target PLS 0.1 (solved for from the headline figures; the paper's own inputs are not known here). With more
nodes it fails more often: `independent`, in proportion to them, and `milder`, to their square root
(`..._milder`). Recoveries are full with Young's interval and partial with the target's, both with saves that
training waits for and in the background (`..._background`; training loses the share of a save's time that
`experiments.checkpointing` measured). Runs that take ten times their useful time are given up. Overheads are
shares of the useful time. Figures:

- `overhead_full_8`, `overhead_partial_8`, `..._100` and so on: simulated, with `..._ci`, half the width of
  the 95 % confidence interval of the mean over runs.
- `partial_saves_tenth_from_nodes`: fewest nodes at which partial recovery saves a tenth of the useful time;
  `..._background`: against full recovery with background saves as well.
- `partial_halves_until_nodes`: most nodes at which all runs with partial recovery end and it is shown to cost
  at most half of what full does. Where runs with full recovery are given up, only the time until then is
  known, so that the question is open beyond this number.
- `recovery_dominates_from_nodes`: fewest nodes at which loading and rescheduling are more than half of what
  partial recovery costs.
- `pls_break_even_8` and so on: target PLS below which partial recovery stops paying, by formula;
  `..._background`: with background saves, which make full recovery cheaper, too.
- `full_ends_until_nodes`, `partial_ends_until_nodes`: most nodes at which every run comes to its end.
- `formula_full_right_until_nodes`, `formula_partial_right_until_nodes`: most nodes at which formulas 4 and 5
  are within a tenth of what is simulated; 5 is wrong for few nodes too, where a job holds one save or two.

Then each assumption of the formulas is broken alone, for a job of 50 failures; simulated over formula:

- `full_over_formula_interval_1`, `..._interval_0.1` and so on: full recovery's overhead with an interval of
  that part of the mean time between failures; `pls_over_formula_interval_1`: partial recovery's PLS.
- `full_over_formula_duration_0.1`, `partial_over_formula_duration_0.1`: saves and recoveries that take that
  part of the mean time between failures, and are broken by failures.
- `lost_over_formula_bursts`: work that full recovery undoes where failures come in bursts (gamma, shape 0.3).
  `pls_over_formula_groups`: PLS where one failure in ten takes 8 nodes, over that where none does.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from cpr.estimator.planning.formulas import pls_threshold
from experiments.harness.command import experiment_parser
from experiments.harness.record import Record, Row
from experiments.scaling.jobs import (
    DURATIONS,
    INTERVALS,
    JOB,
    LAWS,
    SCHEMES,
    TARGET_PLS,
    WAYS_TO_FAIL,
    job_at,
    measure,
    measure_duration,
    measure_interval,
    measure_way,
    waiting_share,
)
from experiments.scaling.picture import draw

NODES: Final = (1, 2, 4, 8, 16, 30, 50, 100, 200, 300, 500, 1000, 2000, 3000, 5000, 10_000)
QUICK_NODES: Final = (1, 8, 100, 1000)
SHOWN_NODES: Final = (8, 100, 1000)
TRIALS: Final = 1000
SEED: Final = 1
GAIN: Final = 0.1
RIGHT: Final = 0.1
"""A formula is right if it differs from the simulation by at most this share."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__).parse_args(arguments)
    nodes, trials = (QUICK_NODES, 30) if options.quick else (NODES, TRIALS)
    blocked_share = waiting_share()
    config = {
        "job": vars(JOB),
        "target_pls": TARGET_PLS,
        "laws": LAWS,
        "nodes": nodes,
        "trials": trials,
        "blocked_share": blocked_share,
    }
    record = Record("scaling", config, seeds=[SEED], quick=options.quick)
    for key, function in measurements(nodes, blocked_share, trials).items():
        record.measure(key, function)
        print(f"{key}: stored", flush=True)
    figures, notes = figures_of(record.rows, blocked_share)
    return record.publish(figures, draw, notes)


def measurements(nodes: Sequence[int], blocked_share: float, trials: int) -> dict[str, Callable[[], Row]]:
    """All measurements by key, in their order."""
    found: dict[str, Callable[[], Row]] = {}
    for law in LAWS:
        for num_nodes in nodes:
            for scheme in SCHEMES:
                key = f"{law}, {num_nodes} nodes, {scheme}"
                found[key] = partial(measure, scheme, num_nodes, law, blocked_share, trials, SEED)
    for ratio in INTERVALS:
        found[f"interval of {ratio:g}"] = partial(measure_interval, ratio, trials, SEED)
    for ratio in DURATIONS:
        found[f"duration of {ratio:g}"] = partial(measure_duration, ratio, trials, SEED)
    for way in WAYS_TO_FAIL:
        found[f"failures: {' '.join(way.split())}"] = partial(measure_way, way, trials, SEED)
    return found


Figures = dict[str, float | None]


def figures_of(rows: Sequence[Row], blocked_share: float) -> tuple[Figures, dict[str, str]]:
    """All figures, and a note for each missing one; training loses `blocked_share` of a background save."""
    figures: Figures = {}
    notes: dict[str, str] = {}
    for law in LAWS:
        ending = "" if law == "independent" else f"_{law}"
        by_scheme = {
            scheme: {
                row["nodes"]: row
                for row in rows
                if row["part"] == "nodes" and row["law"] == law and row["scheme"] == scheme
            }
            for scheme in SCHEMES
        }
        for scheme_name, by_nodes in by_scheme.items():
            for num_nodes in SHOWN_NODES:
                name = f"overhead_{scheme_name}_{num_nodes}{ending}"
                figures[name] = by_nodes[num_nodes]["simulated"]
                figures[f"{name}_ci"] = by_nodes[num_nodes]["simulated_ci"]
        for name, value in _break_even(law, blocked_share).items():
            figures[f"{name}{ending}"] = value
        for name, value in _turning_points(by_scheme).items():
            figures[f"{name}{ending}"] = value
            if value is None:
                notes[f"{name}{ending}"] = "at none of the numbers of nodes"
    return figures | _departures(rows), notes


def _break_even(law: str, blocked_share: float) -> Figures:
    """Compute the target PLS below which partial recovery stops paying, for each number of nodes."""
    figures: Figures = {}
    for num_nodes in SHOWN_NODES:
        for name, share in (("", 1.0), ("_background", blocked_share)):
            figures[f"pls_break_even{name}_{num_nodes}"] = pls_threshold(job_at(num_nodes, law, share))
    return figures


def _turning_points(by_scheme: Mapping[str, Mapping[int, Row]]) -> Figures:
    """Numbers of nodes at which something changes under one law, from rows by scheme and number of nodes.

    None means that it never changes.
    """
    full, partial_ = by_scheme["full"], by_scheme["partial"]
    background = by_scheme["full_background"], by_scheme["partial_background"]

    def nodes_where(holds: Callable[[int], bool]) -> list[int]:
        return sorted(num_nodes for num_nodes in full if holds(num_nodes))

    def saves(full: Mapping[int, Row], partial: Mapping[int, Row]) -> list[int]:
        return nodes_where(lambda n: full[n]["simulated"] - partial[n]["simulated"] >= GAIN)

    def right(rows: Mapping[int, Row]) -> list[int]:
        return nodes_where(lambda n: abs(rows[n]["formula"] / rows[n]["simulated"] - 1) <= RIGHT)

    def ends(rows: Mapping[int, Row]) -> list[int]:
        return nodes_where(lambda n: rows[n]["finished_share"] == 1)

    def recovers(row: Row) -> float:
        parts: dict[str, float] = row["simulated_parts"]
        return parts["load"] + parts["reschedule"]

    ended = set(ends(partial_))
    halves = nodes_where(lambda n: n in ended and partial_[n]["simulated"] <= full[n]["simulated"] / 2)
    dominated = nodes_where(lambda n: recovers(partial_[n]) > partial_[n]["simulated"] / 2)
    return {
        "partial_saves_tenth_from_nodes": min(saves(full, partial_), default=None),
        "partial_saves_tenth_from_nodes_background": min(saves(*background), default=None),
        "partial_halves_until_nodes": max(halves, default=None),
        "recovery_dominates_from_nodes": min(dominated, default=None),
        "full_ends_until_nodes": max(ends(full), default=None),
        "partial_ends_until_nodes": max(ends(partial_), default=None),
        "formula_full_right_until_nodes": max(right(full), default=None),
        "formula_partial_right_until_nodes": max(right(partial_), default=None),
    }


def _departures(rows: Sequence[Row]) -> Figures:
    """Simulated over formula where an assumption is broken."""
    figures: Figures = {}
    for row in rows:
        if row["part"] == "interval":
            figures[f"full_over_formula_interval_{row['ratio']:g}"] = _over(row, "full")
            pls = row["partial"]["simulated_pls"] / row["partial"]["formula_pls"]
            figures[f"pls_over_formula_interval_{row['ratio']:g}"] = pls
        elif row["part"] == "duration":
            figures[f"full_over_formula_duration_{row['ratio']:g}"] = _over(row, "full")
            figures[f"partial_over_formula_duration_{row['ratio']:g}"] = _over(row, "partial")
    ways = {row["way"]: row for row in rows if row["part"] == "way"}
    bursts, groups, alone = (
        ways[name] for name in ("gamma 0.3: in bursts", "1 in 10 takes\n8 nodes", "at random")
    )
    lost = bursts["full"]["simulated_parts"]["lost"] / bursts["full"]["formula_parts"]["lost"]
    groups_pls = groups["partial"]["simulated_pls"] / alone["partial"]["simulated_pls"]
    return figures | {"lost_over_formula_bursts": lost, "pls_over_formula_groups": groups_pls}


def _over(row: Row, recovery: str) -> float:
    over: float = row[recovery]["simulated"] / row[recovery]["formula"]
    return over
