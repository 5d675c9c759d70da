"""Text of a plan with mirrors: what they take, a table by number of nodes, and when they are worth it."""

from collections.abc import Iterator
from typing import Final

from cpr.estimator.planning.formulas import FAR_SHORTER
from cpr.estimator.planning.mirror_plan import MirrorPlan, MirrorPlans
from cpr.estimator.planning.recommend_text import bullets
from cpr.humanize import align_columns, duration_text, share_text, size_text

HEAD: Final = (
    *("    nodes", "a failure each", "full", "partial", "PLS", "mirror", "PLS", "saves at that cost", "PLS"),
    "better",
)
NOTABLE: Final = 0.01
"""Share of the lost nodes from which a reason is told why the mirror does not help them."""


def as_text(plans: MirrorPlans) -> str:
    """Write a plan with mirrors as text."""
    rows = [HEAD, *(_row(plan, plan is plans.own) for plan in plans.sizes)]
    return "\n".join(
        [
            "A mirror in a neighbour's memory (mirror.to=neighbour)",
            *bullets(_costs(plans)),
            "",
            *align_columns(rows),
            "",
            *bullets(_reasons(plans)),
        ]
    )


def _row(plan: MirrorPlan, is_own: bool) -> tuple[str, ...]:
    return (
        f"{'  > ' if is_own else '    '}{plan.job.N_emb:,}",
        duration_text(plan.job.T_fail),
        _overhead(plan.full_overhead),
        _overhead(plan.partial_overhead),
        f"{plan.partial_pls:.2g}",
        _overhead(plan.overhead),
        f"{plan.pls:.2g}",
        duration_text(plan.often_interval_s),
        f"{plan.often_pls:.2g}",
        "mirror" if plan.beats else "saving",
    )


def _overhead(share: float) -> str:
    return share_text(share) if share < 1 else f"{share:,.0%}"


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number:,} steps"


def _costs(plans: MirrorPlans) -> Iterator[str]:
    mirror = plans.mirror
    yield (
        f"Each node gives {size_text(mirror.memory_bytes)} of memory, and sends "
        f"{size_text(mirror.bytes_per_step)} a step, {share_text(mirror.link_share)} of a link of "
        f"{mirror.link_gbps:g} Gb/s. A step takes {share_text(mirror.slow_share)} longer"
        f"{'' if mirror.slows_s is not None else ', if each worker has one core (--mirror-slows)'}."
    )
    yield (
        f"Sent every {_steps(mirror.period_steps)}, it is {mirror.age_steps:.2g} steps behind on average. "
        f"After each failure it takes {duration_text(mirror.fill_s)} until all mirrors are whole again."
    )
    if mirror.period_steps > mirror.every_steps:
        yield (f"The link is too thin to send it every {_steps(mirror.every_steps)}: it gets older instead.")


def _reasons(plans: MirrorPlans) -> Iterator[str]:
    own, limit = plans.own, plans.own.most_slow_share
    alone = (
        f"saves alone, at the same overhead of {share_text(own.overhead)}, can come each "
        f"{duration_text(own.often_interval_s)} and lose {own.often_pls:.2g}"
    )
    if own.beats:
        yield f"The mirror beats saving more often: it loses a PLS of {own.pls:.2g}; {alone}."
        yield (
            f"Whoever accepts a PLS of {own.often_pls:.2g} or more needs no mirror; whoever lacks the memory "
            "can have none."
        )
        if limit is None:
            yield "No interval of saves loses as little as the mirror, whatever it costs."
        else:
            yield f"That holds as long as the mirror makes steps less than {share_text(limit)} longer."
    else:
        yield f"Saving more often beats the mirror, which loses a PLS of {own.pls:.2g}: {alone}."
        if limit is not None and limit > 0:
            yield f"The mirror would be better if it made steps less than {share_text(limit)} longer."
    yield from _uncovered(plans)
    if others := [f"{plan.job.N_emb:,}" for plan in plans.sizes if plan.beats != own.beats]:
        yield f"It is the other way round on {', '.join(others)} nodes."
    yield (
        "The table's nodes all hold as much and fail as often as those of this job. Overheads above "
        f"{share_text(FAR_SHORTER)} are rough; `cpr simulate` makes fewer assumptions."
    )


def _uncovered(plans: MirrorPlans) -> Iterator[str]:
    own, why = plans.own, plans.own.uncovered
    if plans.mirror.share < 1:
        yield f"{share_text(1 - plans.mirror.share)} of the rows have no mirror: they come from saves."
    if why.together >= NOTABLE:
        text = (
            f"{share_text(why.together)} of the lost nodes lose their keeper with them, as "
            f"{plans.failures.group_nodes} neighbours fail at once."
        )
        apart = plans.apart
        if apart.uncovered.together < why.together:
            better = "the mirror" if apart.beats else "saving more often"
            text += (
                f" With keepers in another rack (--mirror-apart), PLS is {apart.pls:.2g}, and {better} is "
                "better."
            )
        yield text
    if why.recovering >= NOTABLE:
        yield f"{share_text(why.recovering)} of them lose their keeper while one of both recovers."
    for plan in dict.fromkeys((own, plans.sizes[-1])):
        if plan.uncovered.filling >= NOTABLE:
            late = share_text(plan.uncovered.filling)
            yield f"On {plan.job.N_emb:,} nodes, {late} are lost before all mirrors are whole again."
