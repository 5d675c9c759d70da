"""Plans the runs of `experiments.overhead`, and computes from them what failures cost in accuracy."""

from collections.abc import Sequence
from statistics import mean
from typing import Final

from experiments.emulation.emulation import NAIVE, VANILLA, Run
from experiments.emulation.figures import NETWORKS, estimates, run_of, setting_of
from experiments.harness.record import Row
from experiments.harness.statistics import Estimate
from experiments.overhead.accounting import OFTEN_PLS, RATIO, TARGET_PLS

SCHEMES: Final = ("mfu", "ssu", "scar", VANILLA, NAIVE, "random", "never")
CHOOSING: Final = ("mfu", "ssu", "scar")


def run(scheme: str, seed: int, ending: str = "", target_pls: float = TARGET_PLS) -> Run:
    """A run under the paper's setting."""
    network, optimizer = NETWORKS[ending]
    return Run(
        scheme=scheme, seed=seed, network=network, optimizer=optimizer, target_pls=target_pls, ratio=RATIO
    )


def plan(seed: int) -> list[Run]:
    """The runs of a seed, the headline's first."""
    runs: list[Run] = []
    for ending in NETWORKS:
        of_network = [run(scheme, seed, ending) for scheme in SCHEMES]
        runs += [of_network[0].without_failures, *of_network]
    return [*runs, run("mfu", seed, target_pls=OFTEN_PLS)]


def by_scheme(rows: Sequence[Row], ending: str) -> dict[str, Estimate]:
    """The difference in AUC of each scheme under the paper's setting."""
    found = estimates(rows)
    return {scheme: found[setting_of(run(scheme, 0, ending))] for scheme in SCHEMES}


def quality_figures(rows: Sequence[Row]) -> dict[str, float]:
    """The figures of accuracy."""
    figures: dict[str, float] = {}
    for ending in NETWORKS:
        for scheme, estimate in by_scheme(rows, ending).items():
            figures |= estimate.figures(f"auc_delta_{scheme}{ending}")
    often = estimates(rows)[setting_of(run("mfu", 0, target_pls=OFTEN_PLS))]
    written = {scheme: _mean_of(rows, "rows_saved", run(scheme, 0)) for scheme in (*CHOOSING, "random")}
    used = {f"budget_used_{scheme}": written[scheme] / written["random"] for scheme in CHOOSING}
    return {
        **figures,
        **often.figures("auc_delta_mfu_often"),
        **used,
        "auc_without_failures": _mean_of(rows, "auc", run(NAIVE, 0).without_failures),
        "pls_vanilla": _mean_of(rows, "pls", run(VANILLA, 0)),
    }


def _mean_of(rows: Sequence[Row], value: str, setting: Run) -> float:
    return mean(float(row[value]) for row in rows if setting_of(run_of(row)) == setting)
