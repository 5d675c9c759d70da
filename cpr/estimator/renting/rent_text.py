"""Text of the choice of workers: the Pareto set, why it is so, and what it rests on."""

from collections.abc import Iterator, Sequence
from typing import Final

from cpr.estimator.planning.formulas import FAR_SHORTER
from cpr.estimator.planning.recommend_text import bullets
from cpr.estimator.renting.offers import Offer, RentPlan
from cpr.humanize import align_columns, count_text, duration_text, share_text

HEAD: Final = ("    workers", "batch", "a step", "samples", "time", "overhead", "money", "choice")
ROUGH: Final = 0.1
"""Overhead above which the formulas, which are of first order, are rough."""
POOR_FIT: Final = 0.05
"""Relative error of the model, in the steps that it was fitted to, above which it is said to be poor."""


def as_text(plan: RentPlan, trials: Sequence[str]) -> str:
    """Write the plan as text.

    Args:
        plan: with its offers.
        trials: descriptions of the runs that it rests on.
    """
    sections = [
        headline(plan),
        "\n".join(align_columns([HEAD, *(_row(plan, offer) for offer in plan.pareto)])),
        "\n".join(["Why", *bullets(_reasons(plan))]),
        "\n".join(["Worth knowing", *bullets(_caveats(plan))]),
        "\n".join(["It rests on", *bullets(trials)]),
    ]
    return "\n\n".join(sections)


def headline(plan: RentPlan) -> str:
    """The cheapest and the fastest offer, in a line or two."""
    best = plan.pareto
    if len(best) == 1:
        return f"Cheapest and fastest: {_short(best[0])}."
    return f"Cheapest: {_short(best[0])}.\nFastest:  {_short(best[-1])}."


def _short(offer: Offer) -> str:
    return (
        f"{count_text(offer.workers, 'worker')}, batch {offer.batch:,}: {duration_text(3600 * offer.hours)}, "
        f"{_money(offer.money)}"
    )


def _money(amount: float) -> str:
    return f"{amount:,.2f}" if amount >= 1 else f"{amount:.3g}"


def _row(plan: RentPlan, offer: Offer) -> tuple[str, ...]:
    best = plan.pareto
    roles = {"cheapest": best[0], "knee": plan.knee, "fastest": best[-1]}
    names = ", ".join(name for name, chosen in roles.items() if chosen is offer)
    mark = "* " if offer.is_extrapolated else "  "
    return (
        f"  {mark}{offer.workers:,}",
        f"{offer.batch:,}",
        duration_text(offer.step_s),
        f"{offer.samples:.3g}",
        duration_text(3600 * offer.hours),
        share_text(offer.overhead),
        _money(offer.money),
        names,
    )


def _reasons(plan: RentPlan) -> Iterator[str]:
    model, samples = plan.step_time, plan.samples
    parts = {
        "fixed": model.fixed_s,
        "per thousand samples of a worker": 1000 * model.sample_s,
        "per further worker": model.worker_s,
    }
    if model.link_bytes_per_s is not None:
        sent_s, link_s = model.sent_byte_s(model.link_bytes_per_s), 1 / model.link_bytes_per_s
        of_it = f", {duration_text(1e6 * link_s)} of it for the links" if sent_s > link_s else ""
        parts[f"per MB that a worker sends{of_it}, as in the run with the slowest links"] = 1e6 * sent_s
    fit = (
        "The runs are as few as these figures, which thus fit them exactly: nothing is known of their errors"
        if model.worst_error is None
        else f"Errors in the runs that this was fitted to: {share_text(model.worst_error)} at most"
    )
    yield (
        f"A step takes {'; '.join(f'{duration_text(each)} {name}' for name, each in parts.items() if each)}. "
        f"{fit}."
    )
    largest = max(plan.offers, key=lambda offer: (offer.workers, offer.batch))
    if largest.workers > 1:
        sent = model.traffic.sent(largest.workers, largest.batch)
        link = plan.link_bytes_per_s or model.link_bytes_per_s or 0.0
        yield (
            f"With {largest.workers} workers and batch {largest.batch:,}, each sends {sent / 1e6:,.3g} MB a "
            f"step, which takes {duration_text(sent / link)} on links of {8e-9 * link:.3g} Gb/s."
        )
    yield f"Samples to the target: {samples.source}."
    critical = samples.critical_batch
    if critical == 0:
        yield "By these runs, a larger batch needs as many steps: choose the smallest that is fast enough."
    elif critical is not None:
        yield (
            f"The critical batch is {critical:,.3g}: a batch of that size takes twice the fewest samples, "
            f"{samples.least_samples:.3g}, and twice the fewest steps, {samples.least_steps:.3g}."
        )
    if plan.failures is not None:
        cheapest = plan.pareto[0]
        recovery, mean_s = cheapest.recovery, plan.failures.T_fail / cheapest.workers
        assert recovery is not None
        yield (
            f"With {count_text(cheapest.workers, 'worker')} a failure comes each {duration_text(mean_s)}: "
            f"{recovery.recovery} recovery and a save each {duration_text(recovery.interval_s)} cost "
            f"{share_text(cheapest.overhead)}."
        )


def _caveats(plan: RentPlan) -> Iterator[str]:
    model = plan.step_time
    if any(offer.is_extrapolated for offer in plan.pareto):
        yield (
            "* is outside of the measured numbers of workers, or of samples of a worker: confirm it with a "
            "run."
        )
    if model.worst_error is None:
        yield "Another run, with other workers and another batch, would show how well a step is predicted."
    elif model.worst_error > POOR_FIT:
        yield "The model of a step's time fits its own runs poorly: run more of them, longer or undisturbed."
    if any(offer.workers > 1 for offer in plan.offers):
        yield (
            "Rented workers are taken to be as fast as those of the runs, as many on a node, and each with "
            "cores of its own."
        )
    yield (
        "The learning rate is that of the runs at every batch; a batch whose rate is tuned may need fewer "
        "samples."
    )
    if plan.failures is None:
        yield "Failures and saves are not counted: --worker-fail and --save count them."
        return
    failures, offers = plan.failures, plan.offers
    restart_s = max(failures.O_save, failures.O_load + failures.O_res)
    least_s = failures.T_fail / max(offer.workers for offer in offers)
    if restart_s > FAR_SHORTER * least_s or max(offer.overhead for offer in offers) > ROUGH:
        yield (
            "Overheads above 10%, and saves or recoveries that are not far shorter than the time between "
            "failures, are rough: `cpr simulate` of the chosen job makes fewer assumptions."
        )
