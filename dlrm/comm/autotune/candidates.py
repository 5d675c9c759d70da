"""Finds the fastest exchange: all candidates are predicted, some are timed, and a few are tried in training.

Predictions come from measured links (`dlrm.comm.links`), cost formulas (`dlrm.comm.cost`) and the time of the
compressor, not of encoding; they decide what is timed, on the actual gradient. Timings of exchanges alone
decide what is tried in training steps, in which caches are cold and ranks do not arrive together.
Lossy exchanges cost accuracy and must save enough: where the dense exchange is a small share of the step, the
answer is dense.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.collectives.collective import Collective, Select
from dlrm.comm.links import Links, best_time_s, finish

MAX_TIMED: Final = 3
"""Largest number of candidates of each kind that are timed."""
TIMED_WITHIN: Final = 2.0
"""Only candidates within this factor of the best prediction are timed; lossless ones are compared with each
other, and encoded ones are never the best, as the time of encoding is not predicted."""
MAX_ROUNDS: Final = 5
BUDGET_S: Final = 5.0
"""Time for as many rounds of timing as fit, at least one, after a warm-up round."""
MAX_TRIED: Final = 5
"""Largest number of candidates that are tried in training."""
TRIED_WITHIN: Final = 1.25
"""Only candidates whose steps, by their timings, are within this factor of the shortest are tried."""
WORTH: Final = 0.02
"""Share of the step that a lossy exchange must save."""

Kind = Literal["lossless", "encoded", "sparse"]
"""All values exactly, all values in fewer bits, or selected values."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A collective to choose from, with its selection; at least one candidate must be lossless."""

    name: str
    collective: Collective
    select: Select
    """Selects the values to send; unused by dense collectives."""
    num_kept: int
    """Values that each rank sends, of sparse collectives."""

    @property
    def kind(self) -> Kind:
        """How values are sent."""
        if self.collective.is_lossless:
            return "lossless"
        return "sparse" if self.collective.is_sparse else "encoded"


@dataclass(frozen=True, kw_only=True)
class ExchangeEstimate:
    """Predictions and measurements of a candidate, the same on all ranks."""

    name: str
    kind: Kind
    sent_bytes: float
    """Bytes that a rank sends per step, on average over ranks."""
    predicted_s: float
    """Predicted seconds of links and compressor."""
    timed_s: float | None = None
    """Seconds of the slowest rank in the fastest round; None: not timed."""
    step_s: float | None = None
    """Seconds of a training step; None: not tried."""
    reason: str = ""
    """Why the candidate was chosen, or not."""


def describe(estimates: Sequence[ExchangeEstimate]) -> str:
    """Format all estimates and reasons as a table."""
    width = max(len(each.name) for each in estimates)
    lines = [f"{'exchange':{width}}  {'MB sent':>9}  {'predicted':>12}  {'timed':>12}  {'step':>12}"]
    for each in estimates:
        times = "  ".join(map(_in_ms, (each.predicted_s, each.timed_s, each.step_s)))
        sent = f"{each.sent_bytes / 1e6:9,.2f}"
        lines.append(f"{each.name:{width}}  {sent}  {times}  {each.reason}".rstrip())
    return "\n".join(lines)


def _in_ms(seconds: float | None) -> str:
    return f"{'' if seconds is None else f'{seconds * 1e3:,.2f} ms':>12}"


def estimate(
    candidates: Sequence[Candidate],
    gradient: Tensor,
    links: Links,
    group: dist.ProcessGroup | None = None,
) -> list[ExchangeEstimate]:
    """Predict and time exchanges by themselves; all ranks call it together, and get the same estimates.

    The gradient, fp32 `[d]`, is a typical one of this rank, and left unchanged.

    Raises:
        ValueError: no candidate is lossless.
    """
    if not any(each.collective.is_lossless for each in candidates):
        raise ValueError("a plan compares with a dense exchange: add a lossless candidate, such as a Ring")
    estimates = _predict(candidates, gradient, links, group)
    times = _time(candidates, _shortlist(estimates), gradient, group)
    return [replace(each, timed_s=times.get(index)) for index, each in enumerate(estimates)]


def finalists(estimates: Sequence[ExchangeEstimate], rest_of_step_s: float) -> list[int]:
    """Select the indices of at most `MAX_TRIED` candidates to try in training, a dense one first.

    Lossy candidates are excluded if they cannot save enough or take longer than the best lossless one, and
    any candidate that makes steps much longer than another.

    Args:
        estimates: of which a lossless one has been timed.
        rest_of_step_s: seconds of a step without the exchange, the same on all ranks.
    """
    # lossless candidates cost no accuracy, and are tried however little they save
    times = {index: each.timed_s for index, each in enumerate(estimates) if each.timed_s is not None}
    dense_s, dense = min(
        (seconds, index) for index, seconds in times.items() if estimates[index].kind == "lossless"
    )
    is_worth_trying = dense_s > WORTH * (rest_of_step_s + dense_s)
    may_be_fastest = [
        index
        for index, seconds in times.items()
        if estimates[index].kind == "lossless" or (is_worth_trying and seconds < dense_s)
    ]
    longest_s = TRIED_WITHIN * (rest_of_step_s + min(times[index] for index in may_be_fastest))
    close = [index for index in may_be_fastest if rest_of_step_s + times[index] <= longest_s]
    return sorted(close, key=lambda index: (index != dense, times[index]))[:MAX_TRIED]


def decide(
    estimates: Sequence[ExchangeEstimate], tried_s: Mapping[int, float]
) -> tuple[int, list[ExchangeEstimate]]:
    """Choose the candidate with the shortest steps, and a lossy one only if it saves enough.

    Args:
        estimates: of all candidates.
        tried_s: seconds of a step by index, the same on all ranks; without lossless candidates if these all
            took too long to be tried.

    Returns:
        The index of the chosen candidate, and the estimates with measured steps and reasons.
    """
    chosen = min(tried_s, key=tried_s.__getitem__)
    reason = "chosen: the shortest steps" if len(tried_s) > 1 else "chosen: nothing else may be worth it"
    lossless = [index for index in tried_s if estimates[index].kind == "lossless"]
    if lossless and len(tried_s) > 1:
        dense = min(lossless, key=tried_s.__getitem__)
        saved = 1 - tried_s[chosen] / tried_s[dense]
        reason = f"chosen: steps are {saved:.1%} shorter than with the best dense one"
        if saved <= WORTH:
            chosen, reason = dense, f"chosen: nothing else makes steps more than {WORTH:.0%} shorter"
    reasons = {index: f"{seconds / tried_s[chosen] - 1:+.1%}" for index, seconds in tried_s.items()}
    reasons[chosen] = reason
    return chosen, [
        replace(each, step_s=tried_s.get(index), reason=reasons.get(index, _not_tried(each)))
        for index, each in enumerate(estimates)
    ]


def _not_tried(estimate: ExchangeEstimate) -> str:
    return "predicted to be slower" if estimate.timed_s is None else "slower by itself, or too little to gain"


def _predict(
    candidates: Sequence[Candidate], gradient: Tensor, links: Links, group: dist.ProcessGroup | None
) -> list[ExchangeEstimate]:
    select_s: dict[Select, float] = {}
    estimates = []
    for each in candidates:
        predicted_s = each.collective.predict_s(links, gradient.numel(), each.num_kept)
        if each.kind == "sparse":
            if each.select not in select_s:
                select_s[each.select] = best_time_s(partial(each.select, gradient), gradient.device, group)
            predicted_s += select_s[each.select]
        estimates.append(
            ExchangeEstimate(
                name=each.name,
                kind=each.kind,
                sent_bytes=each.collective.sent_bytes(gradient.numel(), each.num_kept),
                predicted_s=predicted_s,
            )
        )
    return estimates


def _shortlist(estimates: Sequence[ExchangeEstimate]) -> list[int]:
    """Select the indices of candidates to time, at least one of them lossless."""

    def longest_s(*kinds: Kind) -> float:
        return TIMED_WITHIN * min(each.predicted_s for each in estimates if each.kind in kinds)

    best_first = sorted(range(len(estimates)), key=lambda index: estimates[index].predicted_s)
    limits_s: dict[Kind, float] = {
        "lossless": longest_s("lossless"),
        "encoded": longest_s("lossless", "sparse"),
        "sparse": longest_s("lossless", "sparse"),
    }
    found = []
    for kind, limit_s in limits_s.items():
        indices = [index for index in best_first if estimates[index].kind == kind][:MAX_TIMED]
        found += [index for index in indices if estimates[index].predicted_s <= limit_s]
    return found


def _time(
    candidates: Sequence[Candidate], timed: Sequence[int], gradient: Tensor, group: dist.ProcessGroup | None
) -> dict[int, float]:
    """Time candidates in turns, so that other load of the machine affects all alike."""
    residual = torch.zeros_like(gradient)

    def turn() -> list[float]:
        here = [_exchange_s(candidates[index], gradient, residual, group) for index in timed]
        return slowest(here, gradient.device, group)

    turn()  # the first round makes connections and buffers
    rounds = [turn()]
    while len(rounds) < min(MAX_ROUNDS, BUDGET_S / sum(rounds[0])):
        rounds.append(turn())
    return dict(zip(timed, map(min, zip(*rounds, strict=True)), strict=True))


def _exchange_s(
    candidate: Candidate, gradient: Tensor, residual: Tensor, group: dist.ProcessGroup | None
) -> float:
    """Time one exchange as in training, with error feedback for lossy candidates."""
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
        residual.zero_()  # drop the sum: lossless exchanges leave no residual
    return seconds


def slowest(values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Take the maximum of each value over ranks, so that all ranks decide by the same numbers."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]
