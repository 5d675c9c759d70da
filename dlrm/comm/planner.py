"""Which exchange is fastest here: predicted for all candidates, timed for the best few, agreed by all ranks.

Predictions need the speeds of the links (`dlrm.comm.links`), the formulas that each collective composes of
`dlrm.comm.cost`, and the time that a compressor takes. They only choose what is timed: in place, on the
gradient's own size and values. Whatever leaves something behind costs accuracy, so that it must be worth it:
where the dense exchange is a small share of the step, the answer is dense.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.collectives import Collective, Select
from dlrm.comm.links import Links, best_time_s, finish

MAX_TIMED: Final = 3
"""Candidates of either kind, lossless and lossy, that are timed."""
TIMED_WITHIN: Final = 2.0
"""Times the best prediction, of lossless ones for those: what is predicted to take longer is not timed."""
MAX_ROUNDS: Final = 5
BUDGET_S: Final = 5.0
"""For timing: as many rounds of all as fit, at least one."""
WORTH: Final = 0.02
"""Share of the step that a lossy exchange must save."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to exchange gradients. At least one of those to choose from must be lossless."""

    name: str
    collective: Collective
    select: Select
    """Which values travel (`keeping`); lossless collectives never ask."""
    num_kept: int
    """Of the vector's values that each rank sends; of no meaning where all are sent."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is known of a candidate: the same on all ranks."""

    name: str
    is_lossless: bool
    sent_bytes: float
    """A rank and step, on average over ranks."""
    predicted_s: float
    """Links and compressor."""
    timed_s: float | None = None
    """Of the round in which the slowest rank was fastest; None: it was not timed."""
    reason: str = ""
    """Why it was chosen, or not."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The choice of all ranks."""

    estimates: tuple[Estimate, ...]
    """Of all candidates, in their order."""
    chosen: int
    """Index of the one to use."""
    rest_of_step_s: float
    """What a step takes besides the exchange, on the slowest rank."""

    @property
    def is_dense(self) -> bool:
        """Whether nothing is left behind."""
        return self.estimates[self.chosen].is_lossless

    def describe(self) -> str:
        """A table for people, with the reasons."""
        width = max(len(each.name) for each in self.estimates)
        lines = [f"{'exchange':{width}}  {'MB sent':>9}  {'predicted':>10}  {'timed':>10}"]
        for each in self.estimates:
            timed = "" if each.timed_s is None else f"{each.timed_s * 1e3:,.2f} ms"
            predicted = f"{each.predicted_s * 1e3:,.2f} ms"
            numbers = f"{each.sent_bytes / 1e6:9,.2f}  {predicted:>10}  {timed:>10}"
            lines.append(f"{each.name:{width}}  {numbers}  {each.reason}".rstrip())
        return "\n".join(lines)


def plan(
    candidates: Sequence[Candidate],
    gradient: Tensor,
    links: Links,
    *,
    rest_of_step_s: float,
    group: dist.ProcessGroup | None = None,
) -> Plan:
    """Choose; all ranks call it together, with the same candidates, and get the same plan.

    Args:
        candidates: to choose from.
        gradient: fp32 `[d]`, such as this rank exchanges each step; left as it is.
        links: of the group's ranks.
        rest_of_step_s: what a step takes on this rank besides the exchange.
        group: None is all ranks.

    Raises:
        ValueError: no candidate is lossless.
    """
    if not any(each.collective.is_lossless for each in candidates):
        raise ValueError("a plan compares with a dense exchange: add a lossless candidate, such as a Ring")
    (rest_of_step_s,) = _slowest([rest_of_step_s], gradient.device, group)
    estimates = _predict(candidates, gradient, links, group)
    timed = _shortlist(estimates)
    times = _time(candidates, timed, gradient, group)
    estimates = [
        replace(each, timed_s=times.get(index), reason="" if index in times else "predicted to be slower")
        for index, each in enumerate(estimates)
    ]
    return decide(estimates, rest_of_step_s)


def decide(estimates: Sequence[Estimate], rest_of_step_s: float) -> Plan:
    """The fastest of those timed, but a lossy one only if it is worth it.

    Args:
        estimates: of which one that is lossless has been timed.
        rest_of_step_s: what a step takes besides the exchange.
    """
    times = {index: each.timed_s for index, each in enumerate(estimates) if each.timed_s is not None}
    dense = min((index for index in times if estimates[index].is_lossless), key=times.__getitem__)
    fastest = min(times, key=times.__getitem__)
    dense_step_s = rest_of_step_s + times[dense]
    saved = (times[dense] - times[fastest]) / dense_step_s
    chosen = fastest if saved > WORTH else dense
    share = times[dense] / dense_step_s
    reasons = {
        index: f"{100 * (seconds - times[chosen]) / dense_step_s:+.1f} % of the step"
        for index, seconds in times.items()
    }
    reasons[dense] += f"; dense, {100 * share:.1f} % of the step"
    if chosen == dense:
        reasons[dense] += f": chosen, as nothing else would save more than {100 * WORTH:.0f} %"
    else:
        reasons[chosen] = f"chosen: it saves {100 * saved:.1f} % of the step"
    return Plan(
        estimates=tuple(
            replace(each, reason=reasons.get(index, each.reason)) for index, each in enumerate(estimates)
        ),
        chosen=chosen,
        rest_of_step_s=rest_of_step_s,
    )


def _predict(
    candidates: Sequence[Candidate], gradient: Tensor, links: Links, group: dist.ProcessGroup | None
) -> list[Estimate]:
    select_s: dict[Select, float] = {}
    estimates = []
    for each in candidates:
        collective, seconds = each.collective, 0.0
        if not collective.is_lossless and collective.is_sparse:
            if each.select not in select_s:
                select_s[each.select] = _select_s(each.select, gradient, group)
            seconds = select_s[each.select]
        wire_s = collective.predict_s(links, gradient.numel(), each.num_kept)
        estimates.append(
            Estimate(
                name=each.name,
                is_lossless=collective.is_lossless,
                sent_bytes=collective.sent_bytes(gradient.numel(), each.num_kept),
                predicted_s=wire_s + seconds,
            )
        )
    return estimates


def _select_s(select: Select, gradient: Tensor, group: dist.ProcessGroup | None) -> float:
    def work() -> None:
        select(gradient)
        finish(gradient.device)

    return best_time_s(work, gradient.device, group)


def _shortlist(estimates: Sequence[Estimate]) -> list[int]:
    """Indices of those to time: never empty of lossless ones."""
    best_first = sorted(range(len(estimates)), key=lambda index: estimates[index].predicted_s)
    dense = [index for index in best_first if estimates[index].is_lossless]
    lossy = [index for index in best_first if not estimates[index].is_lossless]
    return [
        index
        for kind, best in ((dense, dense[0]), (lossy, best_first[0]))
        for index in kind[:MAX_TIMED]
        if estimates[index].predicted_s <= TIMED_WITHIN * estimates[best].predicted_s
    ]


def _time(
    candidates: Sequence[Candidate], timed: Sequence[int], gradient: Tensor, group: dist.ProcessGroup | None
) -> dict[int, float]:
    """Seconds of those timed, in turns, so that what else the machine does hits all alike."""
    residual = torch.zeros_like(gradient)

    def turn() -> list[float]:
        here = [_exchange_s(candidates[index], gradient, residual, group) for index in timed]
        return _slowest(here, gradient.device, group)

    turn()  # connections and buffers are made
    rounds = [turn()]
    while len(rounds) < min(MAX_ROUNDS, BUDGET_S / sum(rounds[0])):
        rounds.append(turn())
    return dict(zip(timed, map(min, zip(*rounds, strict=True)), strict=True))


def _exchange_s(
    candidate: Candidate, gradient: Tensor, residual: Tensor, group: dist.ProcessGroup | None
) -> float:
    """Of an exchange as training does it; lossy ones add what they left behind first."""
    is_lossless = candidate.collective.is_lossless
    if is_lossless:
        residual.copy_(gradient)
    finish(gradient.device)
    dist.barrier(group)
    begin = time.perf_counter()
    if is_lossless:
        candidate.collective.sum_in_place(residual)
    else:
        residual.add_(gradient)
        candidate.collective.reduce(residual, candidate.select)
    finish(gradient.device)
    seconds = time.perf_counter() - begin
    if is_lossless:
        residual.zero_()  # it holds a sum, not what was left behind
    return seconds


def _slowest(values: list[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """The maximum over ranks, so that all decide by the same numbers."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]
