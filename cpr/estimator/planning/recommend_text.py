"""A recommendation as text: what to do, what it costs, why, and what would change it."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from cpr.estimator.failures.report import FailureReport
from cpr.estimator.planning.formulas import FAR_SHORTER, FEW_SAVES, Job, interval_partial, overhead_partial
from cpr.estimator.planning.inputs import EstimatorInputs
from cpr.estimator.planning.recommend import MAX_OVERHEAD, Recommendation, RecoveryPlan, recommend
from cpr.humanize import duration_text, share_text

WIDTH: Final = 100
NO_BREAK: Final = "\N{NO-BREAK SPACE}"
NUMBER: Final = re.compile(r"(\d) (ms|s|min|h|d)\b")
"""With its unit, which stays on its line."""
HEAD: Final = ("  overhead by part", "interval", "save", "lost", "load", "reschedule", "together", "PLS")
IN_BACKGROUND: Final = 0.01
"""Share of a save's time that training might lose if it were made in the background."""


def as_text(what: Recommendation, inputs: EstimatorInputs, failures: FailureReport | None = None) -> str:
    """Lines for a person.

    Args:
        what: is recommended.
        inputs: that it rests on.
        failures: how they come, if there is a log.
    """
    sections = [
        ("", [_headline(what)]),
        ("", _table(what)),
        ("Why", _bullets(why(what))),
        ("What would change this", _bullets(changes(what))),
        ("Worth knowing", _bullets(caveats(what))),
        ("Failures", _failures(what, failures) if failures else []),
        ("It rests on", str(inputs).splitlines()),
    ]
    return "\n\n".join("\n".join([title] * bool(title) + list(lines)) for title, lines in sections if lines)


def why(what: Recommendation) -> Iterator[str]:
    """The reasoning, sentence by sentence."""
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
            f"{duration_text(job.delay_partial)} after its moment, and what is trained until then is not in "
            "it."
        )
        return
    longest_s = interval_partial(job, what.target_pls)
    yield (
        f"Partial recovery does no work again, so it may save seldom: a PLS of {what.target_pls:g} allows a "
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
            f"{duration_text(job.O_blocked)}{_of_rows(job)}. What partial recovery still buys then is "
            f"{_gain(what) if what.is_partial else 'nothing'}."
        )
    if what.is_partial:
        restarting = share_text(full.overhead.load + full.overhead.reschedule)
        yield f"Loading and rescheduling ({restarting}) are the same for both: no interval changes that."
    else:
        yield (
            f"That is not enough: at {duration_text(longest_s)} saving alone costs "
            f"{share_text(overhead_partial(job, longest_s).save)}, more than what full recovery spends on "
            f"saves and on work done again ({share_text(full.overhead.save + full.overhead.lost)})."
        )


def _of_rows(job: Job) -> str:
    if job.O_rows is None:
        return ""
    return (
        f"; row saves, of {share_text(job.row_share)} of the rows each, cost "
        f"{duration_text(job.O_blocked_partial)} together until all rows are saved once"
    )


def changes(what: Recommendation) -> Iterator[str]:
    """What would turn the decision, value by value: by its cost, or as the target can be kept no more."""
    now, bounds = what.is_partial, what.thresholds
    other = "full recovery" if now else "partial recovery"
    if bounds.pls is not None and 0 < bounds.pls <= 1:
        side = "below" if now else "above"
        yield f"A target PLS {side} {bounds.pls:.2g} (now {what.target_pls:g}): then {other} is the choice."
    if bounds.T_fail is not None:
        how = "more" if now else "less"
        yield (
            f"A failure each {duration_text(bounds.T_fail)} or {how} often (now each "
            f"{duration_text(what.job.T_fail)}): then {other} is the choice."
        )
    if bounds.O_save is not None:
        how = "more" if now else "less"
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


def caveats(what: Recommendation) -> Iterator[str]:
    """What somebody who follows the recommendation should be told."""
    job, chosen = what.job, what.chosen
    if what.is_partial and job.nodes_lost > 0:
        yield (
            f"Each failure sets {share_text(job.nodes_lost / job.N_emb)} of the rows back by "
            f"{duration_text(chosen.interval_s / 2 + job.delay_partial)} of training on average. What a PLS "
            "costs in model quality depends on the model: try it by failure injection."
        )
    if job.time_to_loss_s is not None:
        yield (
            f"A node is lost each {duration_text(job.time_to_loss_s)}: failures come each "
            f"{duration_text(job.T_fail)} and take {job.nodes_lost:.3g} "
            f"node{'s'[: job.nodes_lost != 1]} on average. A run that chooses its own "
            "interval (`IntervalRule`) begins with that time between losses."
        )
    if what.is_partial and job.nodes_lost == 0:
        yield (
            "No failure that was seen lost any memory, so none is expected to. One lost node would add a PLS "
            f"of {(chosen.interval_s / 2 + job.delay_partial) / (job.T_total * job.N_emb):.2g} on average."
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
            "`cpr simulate` of the same job says what it comes to."
        )
    if what.is_partial and what.ratio < 1:
        yield (
            "The expected PLS counts as if whole tables were saved; saving the most important rows more "
            "often makes each lost sample count for less, but no formula says how much."
        )


def _failures(what: Recommendation, failures: FailureReport) -> list[str]:
    first, *rest = str(failures).splitlines()
    return [first, f"  {_how_certain(what, *failures.interval_s)}", *rest]


def _how_certain(what: Recommendation, low_s: float, high_s: float) -> str:
    """Whether the decision holds where the log says that the mean time between failures is."""
    at_ends = {
        recommend(replace(what.job, T_fail=T_fail), what.target_pls, what.ratio).is_partial
        for T_fail in (low_s, high_s)
    }
    if at_ends == {what.is_partial}:
        return "Anywhere in that range the decision is the same."
    if len(at_ends) == 1:
        return (
            f"In that range the decision is the other one: it rests on a failure each "
            f"{duration_text(what.job.T_fail)}, which is not what this log says."
        )
    turn = what.thresholds.T_fail
    if turn is not None and low_s < turn < high_s:
        return f"So the decision is not certain: it turns at {duration_text(turn)}, inside that range."
    return "So the decision is not certain: it turns inside that range."


def _headline(what: Recommendation) -> str:
    chosen, job = what.chosen, what.job
    rows = ""
    if what.row_interval_s is not None:
        rows = (
            f", as the {share_text(what.ratio)} most important rows each {duration_text(what.row_interval_s)}"
        )
    told = (
        f"{chosen.recovery.capitalize()} recovery, a save each {duration_text(chosen.interval_s)}{rows}.\n"
        f"Expected: {share_text(chosen.overhead.total)} overhead "
        f"({duration_text(chosen.overhead.total * job.T_total)} of {duration_text(job.T_total)})"
    )
    if what.is_partial:
        pls = f"a PLS of {chosen.expected_pls:.2g}"
        return f"{told} and {pls}.\nThat is {_gain(what)} less than full recovery at its best."
    return f"{told}, and nothing is lost."


def _table(what: Recommendation) -> list[str]:
    named = [("partial", what.partial), ("partial, full's interval", what.naive), ("full", what.full)]
    rows = [HEAD, *(_row(name, plan, plan is what.chosen) for name, plan in named if plan is not None)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(cells) for cells in aligned]


def _row(name: str, plan: RecoveryPlan, is_chosen: bool) -> tuple[str, ...]:
    cost = plan.overhead
    parts = (cost.save, cost.lost, cost.load, cost.reschedule, cost.total)
    mark = "> " if is_chosen else "  "
    return (mark + name, duration_text(plan.interval_s), *map(share_text, parts), f"{plan.expected_pls:.2g}")


def _gain(what: Recommendation) -> str:
    return f"{share_text(what.gain)} of training time ({duration_text(what.gain * what.job.T_total)})"


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [
        line.replace(NO_BREAK, " ")
        for sentence in sentences
        for line in textwrap.wrap(
            NUMBER.sub(rf"\1{NO_BREAK}\2", sentence), WIDTH, initial_indent="  - ", subsequent_indent="    "
        )
    ]
