"""The job of `experiments.scaling` at any number of nodes, and what one of its schemes costs there."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from cpr.estimator.planning.formulas import (
    Job,
    Overhead,
    expected_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
)
from cpr.estimator.simulation.simulation import PARTS, Recovery, Simulation, SimulationConfig, simulate
from experiments.emulation.emulation import NODES, PRODUCTION
from experiments.harness.record import RESULTS, Row, finished_result

TARGET_PLS: Final = 0.1
JOB: Final = replace(PRODUCTION, O_load=PRODUCTION.O_load / 2, O_res=PRODUCTION.O_load / 2)
"""The emulated job; only the sum of loading and rescheduling is known, of which each is half here."""
LAWS: Final = {"independent": 1.0, "milder": 0.5}
"""By name: `T_fail` falls with this power of the number of nodes. Nodes that fail independently make it 1."""


@dataclass(frozen=True)
class Scheme:
    """How a job saves and recovers."""

    recovery: Recovery
    is_background: bool

    @property
    def name(self) -> str:
        """The name in rows and figures."""
        return f"{self.recovery}_background" if self.is_background else self.recovery


SCHEMES: Final = tuple(
    Scheme(recovery, background) for background in (False, True) for recovery in ("full", "partial")
)


def waiting_share(folder: Path = RESULTS) -> float:
    """The share of a background save's time that training loses by waiting and by slower steps.

    `experiments.checkpointing` measured it, where workers and writers share two processor cores.

    Raises:
        ValueError: that result is not there.
    """
    path = folder / "checkpointing.json"
    stored = finished_result(path)
    if stored is None:
        raise ValueError(f"{path} is not finished; run python -m experiments.checkpointing first")
    return 1 - float(stored["figures"]["throughput_while_saving"])


def job_at(num_nodes: int, law: str, blocked_share: float = 1.0) -> Job:
    """The job on `num_nodes` nodes that fail by one of `LAWS`.

    The times of a save and a load do not change: tables grow with the nodes, and each node has its own part.

    Args:
        num_nodes: number of nodes.
        law: a name in `LAWS`.
        blocked_share: share of a save's time that training loses; 1: saves are synchronous.
    """
    mean_s = JOB.T_fail * (NODES / num_nodes) ** LAWS[law]
    blocked_s = None if blocked_share == 1 else blocked_share * JOB.O_save
    return replace(JOB, N_emb=num_nodes, T_fail=mean_s, blocked_save=blocked_s)


def measure(
    scheme: Scheme, num_nodes: int, law: str, blocked_share: float, num_trials: int, seed: int
) -> Row:
    """Overhead and PLS, by formula and simulated."""
    job = job_at(num_nodes, law, blocked_share if scheme.is_background else 1.0)
    if scheme.recovery == "full":
        interval_s = interval_full(job)
        expected, pls = overhead_full(job, interval_s), 0.0
    else:
        interval_s = interval_partial(job, TARGET_PLS)
        expected, pls = overhead_partial(job, interval_s), expected_pls(job, interval_s)
    config = SimulationConfig(
        job=job, recovery=scheme.recovery, interval_s=interval_s, num_trials=num_trials, seed=seed
    )
    about = {"part": "nodes", "scheme": scheme.name, "nodes": num_nodes, "law": law}
    return {**about, **compared(expected, pls, simulate(config))}


def compared(expected: Overhead, pls: float, simulation: Simulation) -> Row:
    """The fields of a row that compare a formula with a simulation."""
    return {
        "T_fail_s": simulation.config.job.T_fail,
        "interval_s": simulation.config.interval_s,
        "formula": expected.total,
        "formula_parts": {part: getattr(expected, part) for part in PARTS},
        "formula_pls": pls,
        "simulated": simulation.overhead.value,
        "simulated_ci": simulation.overhead.half_width,
        "simulated_parts": {part: mean.value for part, mean in simulation.parts.items()},
        "simulated_pls": simulation.pls.value,
        "simulated_pls_ci": simulation.pls.half_width,
        "finished_share": simulation.finished_share,
    }
