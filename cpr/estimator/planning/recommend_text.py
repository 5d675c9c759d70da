"""Text of a recommendation: the choice, its costs, the reasons, and what would change it."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cpr.estimator.planning.estimator_inputs import EstimatorInputs
from cpr.estimator.planning.formulas import FAR_SHORTER, FEW_SAVES, Job, interval_partial, overhead_partial
from cpr.estimator.planning.recommend import MAX_OVERHEAD, Recommendation, RecoveryPlan, recommend
from cpr.humanize import align_columns, duration_text, share_text

if TYPE_CHECKING:
    from cpr.estimator.failures.log_report import LogReport  # which imports scipy

WIDTH: Final = 100
NO_BREAK: Final = "\N{NO-BREAK SPACE}"
NUMBER: Final = re.compile(r"(\d) (ms|s|min|h|d)\b")
"""A number with its unit, which must not be wrapped."""
HEAD: Final = ("  overhead by part", "interval", "save", "lost", "load", "reschedule", "together", "PLS")
IN_BACKGROUND: Final = 0.01
"""Share of a save's time that training might lose with background saves."""


def as_text(what: Recommendation, inputs: EstimatorInputs, failures: "LogReport | None" = None) -> str:
    """Write a recommendation as text, with the values it rests on and the report on a failure log, if any."""
    sections = [
        ("", [headline(what)]),
        ("", align_columns(cost_table(what))),
        *((title, bullets(sentences)) for title, sentences in explanations(what).items()),
        ("Failures", _failures(what, failures) if failures else []),
        ("It rests on", str(inputs).splitlines()),
    ]
    return "\n\n".join("\n".join([title] * bool(title) + list(lines)) for title, lines in sections if lines)


def explanations(what: Recommendation) -> dict[str, list[str]]:
    """Sentences by title: the reasons, what would change the decision, and what else matters."""
    return {
        "Why": list(_reasons(what)),
        "What would change this": list(_changes(what)),
        "Worth knowing": list(_caveats(what)),
    }


def headline(what: Recommendation) -> str:
    """The decision, and what it is expected to cost, in two or three lines."""
    chosen, job, rows = what.chosen, what.job, ""
    if what.row_interval_s is not None:
        rows = (
            f", as the {share_text(what.ratio)} most important rows each {duration_text(what.row_interval_s)}"
        )
    text = (
        f"{chosen.recovery.capitalize()} recovery, a save each {duration_text(chosen.interval_s)}{rows}.\n"
        f"Expected: {share_text(chosen.overhead.total)} overhead "
        f"({duration_text(chosen.overhead.total * job.T_total)} of {duration_text(job.T_total)})"
    )
    if not what.is_partial:
        return f"{text}, and nothing is lost."
    return (
        f"{text} and a PLS of {chosen.expected_pls:.2g}.\n"
        f"That is {_gain(what)} less than full recovery at its best."
    )


def cost_table(what: Recommendation) -> list[tuple[str, ...]]:
    """Overhead of each way by its parts: cells of the head and of each row; `>` marks the chosen one."""
    named = [("partial", what.partial), ("partial, full's interval", what.naive), ("full", what.full)]
    return [HEAD, *(_row(name, plan, plan is what.chosen) for name, plan in named if plan)]


def _row(name: str, plan: RecoveryPlan, is_chosen: bool) -> tuple[str, ...]:
    cost = plan.overhead
    parts = (cost.save, cost.lost, cost.load, cost.reschedule, cost.total)
    mark = "> " if is_chosen else "  "
    return (mark + name, duration_text(plan.interval_s), *map(share_text, parts), f"{plan.expected_pls:.2g}")


def _reasons(what: Recommendation) -> Iterator[str]:
    job, full, partial = what.job, what.full, what.partial
    back = duration_text(full.overhead.lost * job.T_fail)
    yield (
        f"Full recovery is cheapest with a save each {duration_text(full.interval_s)} (Young's optimum): "
        f"{share_text(full.overhead.save)} for saving, and {share_text(full.overhead.lost)} because each "
        f"failure throws the whole job back, by {back} on average."
    )
    if partial is None:
        yield (
            f"Partial recovery cannot keep a PLS of {what.target_pls:g}: a save counts only "
            f"{duration_text(job.delay_partial)} after its start, without what is trained until then."
        )
        return
    longest_s = interval_partial(job, what.target_pls)
    yield (
        f"Partial recovery repeats no work, so it may save seldom: a PLS of {what.target_pls:g} allows a "
        f"save each {duration_text(longest_s)}{', once in the job' if longest_s == job.T_total else ''}."
    )
    if partial.interval_s < longest_s:
        yield (
            f"Saves are cheap here. Coming each {duration_text(partial.interval_s)} they cost "
            f"{share_text(partial.overhead.save)}, and keep the expected PLS at {partial.expected_pls:.2g}."
        )
    if job.blocked_save is not None:
        yield (
            f"Saves are made in the background: one takes {duration_text(job.O_save)} and costs training "
            f"{duration_text(job.O_blocked)}{_cost_of_rows(job)}. What partial recovery still gains then is "
            f"{_gain(what) if what.is_partial else 'nothing'}."
        )
    if what.is_partial:
        restarting = share_text(full.overhead.load + full.overhead.reschedule)
        yield f"Loading and rescheduling ({restarting}) are the same for both: no interval changes that."
    else:
        yield (
            f"That is not enough: at {duration_text(longest_s)} saving alone costs "
            f"{share_text(overhead_partial(job, longest_s).save)}, more than what full recovery spends on "
            f"saves and on repeated work ({share_text(full.overhead.save + full.overhead.lost)})."
        )


def _cost_of_rows(job: Job) -> str:
    if job.O_rows is None:
        return ""
    return (
        f"; row saves, of {share_text(job.row_share)} of the rows each, cost "
        f"{duration_text(job.O_blocked_partial)} together until all rows are saved once"
    )


def _changes(what: Recommendation) -> Iterator[str]:
    now, bounds = what.is_partial, what.thresholds
    other = "full recovery" if now else "partial recovery"
    how = "more" if now else "less"
    if bounds.pls is not None and 0 < bounds.pls <= 1:
        side = "below" if now else "above"
        yield f"A target PLS {side} {bounds.pls:.2g} (now {what.target_pls:g}): then {other} is the choice."
    if bounds.T_fail is not None:
        yield (
            f"A failure each {duration_text(bounds.T_fail)} or {how} often (now each "
            f"{duration_text(what.job.T_fail)}): then {other} is the choice."
        )
    if bounds.O_save is not None:
        yield (
            f"A save that takes {how} than {duration_text(bounds.O_save)} (now "
            f"{duration_text(what.job.O_save)}): then {other} is the choice."
        )
    if bounds.T_fail is None and bounds.O_save is None:
        yield "No other single value within reach: neither the time between failures nor that of a save."
    if what.job.blocked_save is None:
        yield _in_background(what)


def _in_background(what: Recommendation) -> str:
    blocked_s = IN_BACKGROUND * what.job.O_save
    then = recommend(replace(what.job, blocked_save=blocked_s), what.target_pls, what.ratio)
    flag = f"--blocked {duration_text(blocked_s).replace(' ', '')}"
    partial = "could not keep the target" if then.partial is None else share_text(then.partial.overhead.total)
    return (
        f"Saving in the background: if each save cost training {share_text(IN_BACKGROUND)} of the time that "
        f"it takes ({flag}), full recovery would cost {share_text(then.full.overhead.total)} and partial "
        f"recovery {partial}."
    )


def _caveats(what: Recommendation) -> Iterator[str]:
    job, chosen = what.job, what.chosen
    lost_s = chosen.interval_s / 2 + job.delay_partial
    if what.is_partial and job.nodes_lost > 0:
        yield (
            f"Each failure sets {share_text(job.nodes_lost / job.N_emb)} of the rows back by "
            f"{duration_text(lost_s)} of training on average. What a PLS costs in model quality depends on "
            "the model: try it by failure injection."
        )
    if job.time_to_loss_s is not None:
        yield (
            f"A node is lost each {duration_text(job.time_to_loss_s)}: failures come each "
            f"{duration_text(job.T_fail)} and take {job.nodes_lost:.3g} "
            f"node{'s'[: job.nodes_lost != 1]} on average. A run that chooses its own "
            "interval (`IntervalRule`) starts with that time between losses."
        )
    if what.is_partial and job.nodes_lost == 0:
        yield (
            "No failure that was seen lost any memory, so none is expected to. One lost node would add a PLS "
            f"of {lost_s / (job.T_total * job.N_emb):.2g} on average."
        )
    if what.is_partial and what.gain < MAX_OVERHEAD:
        yield (
            f"Partial recovery is cheaper by {_gain(what)} only. Full recovery loses no samples, which may "
            "well be worth that."
        )
    if what.is_partial and job.T_total < FEW_SAVES * chosen.interval_s:
        yield (
            f"That is {job.T_total / chosen.interval_s:.2g} saves in the whole job, and the formulas are "
            "averages over many."
        )
    if max(job.O_save, job.O_load + job.O_res) > FAR_SHORTER * job.T_fail:
        yield (
            "Saving or recovering is not far shorter than the time between failures, as the formulas assume: "
            "`cpr simulate` of the same job computes what that changes."
        )
    if what.is_partial and what.ratio < 1:
        yield (
            "The expected PLS counts as if whole tables were saved; saving the most important rows more "
            "often makes each lost sample count for less, but no formula tells how much."
        )


def _failures(what: Recommendation, failures: "LogReport") -> list[str]:
    first, *rest = str(failures).splitlines()
    return [first, f"  {_certainty(what, *failures.interval_s)}", *rest]


def _certainty(what: Recommendation, low_s: float, high_s: float) -> str:
    """Say in words whether the decision holds for all mean times between failures that the log allows."""
    # the decision turns at most once between the ends: partial recovery gains with rarer failures
    at_ends = {
        recommend(replace(what.job, T_fail=T_fail), what.target_pls, what.ratio).is_partial
        for T_fail in (low_s, high_s)
    }
    if at_ends == {what.is_partial}:
        return "Anywhere in that range the decision is the same."
    if len(at_ends) == 1:
        return (
            f"In that range the decision is the other one: it rests on a failure each "
            f"{duration_text(what.job.T_fail)}, which contradicts this log."
        )
    turn = what.thresholds.T_fail
    at = f" at {duration_text(turn)}," if turn is not None and low_s < turn < high_s else ""
    return f"So the decision is not certain: it turns{at} inside that range."


def _gain(what: Recommendation) -> str:
    return f"{share_text(what.gain)} of training time ({duration_text(what.gain * what.job.T_total)})"


def bullets(sentences: Iterable[str]) -> list[str]:
    """Lines of a list, wrapped between words, but not between a number and its unit."""
    return [
        line.replace(NO_BREAK, " ")
        for sentence in sentences
        for line in textwrap.wrap(
            NUMBER.sub(rf"\1{NO_BREAK}\2", sentence), WIDTH, initial_indent="  - ", subsequent_indent="    "
        )
    ]
