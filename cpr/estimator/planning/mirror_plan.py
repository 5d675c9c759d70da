"""Whether a mirror beats saving more often: both at the same cost, on 8 to 10,000 nodes.

With the mirror, training saves at the same interval as without. Saving more often is given the overhead of
the mirror: what it would lose then is compared with what the mirror loses.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from cpr.estimator.failures.arrivals import FailureModel
from cpr.estimator.planning.formulas import (
    Job,
    expected_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
    reachable_pls,
)
from cpr.estimator.planning.mirror import (
    MirrorModel,
    Uncovered,
    expected_pls_with_mirror,
    overhead_with_mirror,
    uncovered,
)
from cpr.estimator.planning.recommend import recommended_interval

SIZES: Final = (8, 100, 1_000, 10_000)
"""Numbers of nodes for which a plan is made, besides the job's own."""


@dataclass(frozen=True, kw_only=True)
class MirrorPlan:
    """Costs of a job without and with mirrors; overheads are shares of useful training time."""

    job: Job
    interval_s: float
    """From save to save of partial recovery, without and with the mirror."""
    full_overhead: float
    """Of full recovery at its best interval."""
    partial_overhead: float
    partial_pls: float
    """Expected PLS without the mirror."""
    overhead: float
    """With the mirror."""
    pls: float
    """Expected PLS with the mirror."""
    uncovered: Uncovered
    often_interval_s: float
    """The interval at which saving more often costs as much as the mirror, or the shortest possible."""
    often_pls: float
    """Expected PLS with that interval, without the mirror."""
    most_slow_share: float | None
    """What a step may lose to the mirror before saving more often is better; None: any share, as no interval
    reaches the mirror's PLS. Negative: the mirror loses more than the saves do already."""

    @property
    def beats(self) -> bool:
        """Whether the mirror loses less than more frequent saves at its cost."""
        return self.pls < self.often_pls

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        names = ("interval_s", "full_overhead", "partial_overhead", "partial_pls", "overhead", "pls")
        more = ("often_interval_s", "often_pls", "most_slow_share", "beats")
        return {
            "nodes": self.job.N_emb,
            "T_fail": self.job.T_fail,
            **{name: getattr(self, name) for name in (*names, *more)},
            "uncovered": {**asdict(self.uncovered), "total": self.uncovered.total},
        }


@dataclass(frozen=True, kw_only=True)
class MirrorPlans:
    """Plans with a mirror for a job, and for jobs like it on more or fewer nodes."""

    mirror: MirrorModel
    failures: FailureModel
    own: MirrorPlan
    apart: MirrorPlan
    """If neighbours in the ring never failed together."""
    sizes: tuple[MirrorPlan, ...]
    """By number of nodes, ascending, the job's own among them. Each node holds as much as it does in the job,
    and fails as often."""

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values: bytes of a node, seconds, steps and shares."""
        names = ("memory_bytes", "bytes_per_step", "link_share", "slow_share")
        more = ("period_steps", "age_steps", "fill_s")
        return {
            **{name: getattr(self.mirror, name) for name in (*names, *more)},
            "own": self.own.to_json(),
            "apart": self.apart.to_json(),
            "sizes": [plan.to_json() for plan in self.sizes],
        }


def plan_mirror(job: Job, mirror: MirrorModel, failures: FailureModel, target_pls: float) -> MirrorPlans:
    """Plan a mirror for a job.

    Args:
        job: on two nodes at least; its `nodes_lost` is that of its failures.
        mirror: of each node.
        failures: how many nodes fail together.
        target_pls: acceptable portion of lost samples.

    Raises:
        ValueError: there is one node only, or the target is impossible.
    """
    sizes = sorted({*SIZES, job.N_emb})
    plans = {num: _plan(_on(job, num, failures), mirror, failures, target_pls) for num in sizes}
    apart = replace(mirror, distance=failures.group_nodes)
    return MirrorPlans(
        mirror=mirror,
        failures=failures,
        own=plans[job.N_emb],
        apart=_plan(job, apart, failures, target_pls),
        sizes=tuple(plans.values()),
    )


def _on(job: Job, num_nodes: int, failures: FailureModel) -> Job:
    """A job like this one on another number of nodes, which fail independently."""
    group = min(failures.group_nodes, num_nodes)
    return replace(
        job,
        N_emb=num_nodes,
        T_fail=job.T_fail * job.N_emb / num_nodes,
        nodes_lost=min(1.0, job.nodes_lost) * (1 + failures.group_share * (group - 1)),
    )


def _plan(job: Job, mirror: MirrorModel, failures: FailureModel, target_pls: float) -> MirrorPlan:
    can_keep = target_pls >= reachable_pls(job)
    interval_s = recommended_interval(job, target_pls) if can_keep else job.shortest_partial
    partial, cost = overhead_partial(job, interval_s), overhead_with_mirror(job, interval_s, mirror)
    pls = expected_pls_with_mirror(job, interval_s, mirror, failures)
    saving = partial.save + cost.total - partial.total
    often_s = min(job.O_blocked_partial / saving if saving else interval_s, interval_s)
    often_s = max(often_s, job.shortest_partial)
    return MirrorPlan(
        job=job,
        interval_s=interval_s,
        full_overhead=overhead_full(job, interval_full(job)).total,
        partial_overhead=partial.total,
        partial_pls=expected_pls(job, interval_s),
        overhead=cost.total,
        pls=pls,
        uncovered=uncovered(job, mirror, failures),
        often_interval_s=often_s,
        often_pls=expected_pls(job, often_s),
        most_slow_share=_most_slow_share(job, interval_s, pls),
    )


def _most_slow_share(job: Job, interval_s: float, pls: float) -> float | None:
    if pls < reachable_pls(job):
        return None
    as_often_s = interval_partial(job, min(1.0, pls)) if job.nodes_lost else job.T_total
    return job.O_blocked_partial * (1 / as_often_s - 1 / interval_s)
