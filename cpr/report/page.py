"""The page `report.html` of a run: one file without scripts and without references to anything outside.

It shows what the run has recorded until now, and says what is not known. Made at the end of a run of
`dlrm.train`, and by `cpr report` at any time.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Final

from cpr.checkpoint.storage.base import Storage
from cpr.estimator.history import FailureCost, RunHistory, SaveCost
from cpr.estimator.planning.estimator_inputs import gather
from cpr.estimator.planning.recommend import recommend
from cpr.estimator.planning.recommend_text import cost_table, explanations, headline
from cpr.humanize import count_text, duration_text, share_text, size_text
from cpr.recovery.run.report import PHASES
from cpr.report.drawing import (
    Point,
    Series,
    bar,
    bullets,
    chart,
    legend,
    paragraph,
    table,
    text,
    tiles,
    unknown,
)
from cpr.report.records import Line, RunRecords, number, numbers

PAGE_NAME: Final = "report.html"
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""Browsers neither run scripts on the page nor load anything for it."""
STEP_PARTS: Final = {
    "data": "waiting for data",
    "forward_backward": "forward, backward, tables",
    "dense_exchange": "exchange of dense gradients",
    "optimizer": "dense optimizer",
    "recording": "metrics",
    "saving": "saves, priorities, mirrors",
}
"""Parts of a step that `dlrm.train` times, and their names on the page."""
KINDS: Final = {
    "process": "all memory survived; nothing was lost",
    "mirror": "lost rows came from mirrors",
    "partial": "partial recovery: lost rows came from the checkpoint",
    "full": "full recovery: all workers went back to the checkpoint",
}
ORIGINS: Final = {
    "adopted": "stayed in memory",
    "moved": "moved between workers",
    "mirrored": "from mirrors",
    "lost": "from the checkpoint",
}


def write_page(records: RunRecords, storage: Storage, name: str = PAGE_NAME) -> None:
    """Write the page atomically as file `name`.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with storage.create(name) as sink:
        sink.write(memoryview(as_html(records, datetime.now(UTC)).encode()))


def as_html(records: RunRecords, now: datetime) -> str:
    """The page as it is at the time `now`."""
    sections = {
        "Learning curve": _learning_curve(records),
        "Speed": _speed(records),
        **({"Stream": _stream(records)} if records.of_kind("stream") else {}),
        "Where a step's time goes": _step_parts(records),
        "Saves": _saves(records),
        "Failures": _failures(records),
        "Portion of lost samples (PLS)": _pls(records),
        "What cpr plan advises now": _advice(records),
        "Run": _about(records),
    }
    title = Path(records.name).name
    style = files("cpr.report").joinpath("page.css").read_text()
    body = "".join(
        f"<section><h2>{text(name)}</h2>{''.join(parts)}</section>" for name, parts in sections.items()
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{text(title)}</title><style>{style}</style></head>"
        f"<body><h1>{text(title)}</h1>{''.join(_head(records, now))}{body}</body></html>\n"
    )


def _head(records: RunRecords, now: datetime) -> Iterator[str]:
    yield paragraph(f"{_state(records, now)} This page was made at {_time(now)}.")
    history, trained = records.history, records.of_kind("train")
    steps, samples = (
        getattr(history, f"{name}_done")
        if history is not None
        else number(trained[-1].get(key))
        if trained
        else None
        for name, key in (("steps", "step"), ("samples", "samples"))
    )
    total, failed = None if history is None else history.samples_total, records.num_failed_saves
    figures = {
        "steps": "unknown" if steps is None else f"{steps:,.0f}",
        "samples": "unknown" if samples is None else f"{samples:,.0f}{_of(samples, total)}",
        "AUC": _newest(records, "auc"),
        "PLS": "unknown" if records.pls is None else f"{records.pls:.6f}",
        "failures": str(len(records.failures)),
        "saves": f"{len(records.saves):,}{f' ({failed:,} failed)' if failed else ''}",
    }
    yield tiles(figures)
    if at_s := min(_recorded_until_s(records), now.timestamp()):
        yield paragraph(f"The figures are those recorded until {_time(datetime.fromtimestamp(at_s, UTC))}.")
    if records.problems:
        note = paragraph("Not everything could be read:") + bullets(records.problems)
        yield f'<div class="problems">{note}</div>'


def _about(records: RunRecords) -> Iterator[str]:
    versions, machine = records.versions, records.versions.get("machine")
    host = machine if isinstance(machine, Mapping) else {}
    command = versions.get("command")
    found = {
        "folder": records.name,
        "checkpoints": records.checkpoint,
        "recipe": records.config.get("recipe"),
        "command": " ".join(map(str, command)) if isinstance(command, Sequence) else command,
        "workers": versions.get("world_size", records.history and records.history.world_size),
        "machine of rank 0": host.get("name"),
        "torch": versions.get("torch_build"),
        "starts": len(records.of_kind("hyperparameters")) or None,
    }
    rows = [(name, str(value)) for name, value in found.items() if value is not None]
    yield f'<div class="facts">{table((), rows)}</div>'


def _state(records: RunRecords, now: datetime) -> str:
    """Whether the run has ended, as far as its records say."""
    last = records.lines[-1] if records.lines else {}
    history = records.history
    if last.get("kind") == "end":
        is_done = last.get("reason") == "finished"
        return "The run has finished." if is_done else f"The run has ended: {last.get('reason')}."
    at_s = _recorded_until_s(records)
    if not at_s:
        return "It is not recorded whether the run has ended."
    ago = duration_text(max(0.0, now.timestamp() - at_s))
    newest = f"Its newest record was {ago} old when this page was made."
    if history is not None and history.samples_total and history.samples_done >= history.samples_total:
        return f"All samples are trained. {newest}"
    return f"No end is recorded: the run still trains, or was killed. {newest}"


def _recorded_until_s(records: RunRecords) -> float:
    """Unix time of the newest record; 0 if none has a time."""
    if records.history is not None:
        return records.history.clock_s
    return max([0.0, *(number(line.get("time")) or 0.0 for line in records.lines)])


def _learning_curve(records: RunRecords) -> Iterator[str]:
    evaluated, trained = records.of_kind("evaluation"), records.of_kind("train")
    if not records.lines:
        yield unknown("Not known: dlrm.train records losses and metrics, other scripts do not.")
        return
    if not evaluated:
        yield unknown(
            "No evaluation is recorded yet; curves of training are those of rank 0's newest samples."
        )
    best = [each for each in (number(line.get("best_auc")) for line in evaluated) if each is not None]
    ends = [x for x, _ in (*_points(trained, "auc"), *_points(evaluated, "auc"))]
    limit = [(min(ends), best[-1]), (max(ends), best[-1])] if best and ends else []
    before = records.of_kind("progressive")
    yield _curve("AUC", _points(evaluated, "auc"), _points(trained, "auc"), limit, _points(before, "auc"))
    yield _curve(
        "log loss",
        _points(evaluated, "log_loss"),
        _points(trained, "loss"),
        windows=_points(before, "log_loss"),
    )
    means = [(line, numbers(line.get("metrics"))) for line in evaluated]
    for name in dict.fromkeys(name for _, values in means for name in values):
        points = [(number(line.get("samples")), values.get(name)) for line, values in means]
        yield _curve(name, [(x, y) for x, y in points if x is not None and y is not None], [])


def _curve(
    title: str,
    evaluated: list[Point],
    trained: list[Point],
    limit: Sequence[Point] = (),
    windows: Sequence[Point] = (),
) -> str:
    series = (
        Series(name="on the test days", points=evaluated, marked=True),
        Series(name="during training", points=trained),
        Series(name="of a window, before it was trained", points=windows),
        Series(name="best that any model can reach", points=limit),
    )
    return chart(title, series, "training samples", _count, _plain)


def _speed(records: RunRecords) -> Iterator[str]:
    trained, history = records.of_kind("train"), records.history
    speeds = [each for each in (number(line.get("samples_per_s")) for line in trained) if each is not None]
    if speeds:
        yield paragraph(
            f"Median {median(speeds):,.0f} samples/s, newest {speeds[-1]:,.0f}, over all workers, without "
            "evaluations. Dashed lines: starts of workers."
        )
    elif history is not None and history.step_s > 0 and history.steps_done:
        speed = history.samples_done / history.steps_done / history.step_s
        yield paragraph(
            f"{speed:,.0f} samples/s while no save runs: steps of {duration_text(history.step_s)}."
        )
        yield unknown("How it has changed is not recorded.")
        return
    points = _points(trained, "samples_per_s", x="time")
    if not points:
        yield unknown("Over time, the speed is not known: no line of metrics.jsonl has a time.")
        return
    first, unit, unit_s = points[0][0], *_unit(points[-1][0] - points[0][0])
    starts = {
        (each - first) / unit_s: f"start {count} at step {line.get('step')}"
        for count, line in enumerate(records.of_kind("hyperparameters"), start=1)
        if count > 1 and (each := number(line.get("time"))) is not None
    }
    series = [Series(name="samples/s", points=[((x - first) / unit_s, y) for x, y in points])]
    yield chart("samples/s", series, f"{unit} since the first line", _plain, _count, starts, from_zero=True)


def _stream(records: RunRecords) -> Iterator[str]:
    lines = records.of_kind("stream")
    newest = lines[-1]
    counts = {name: number(newest.get(name)) for name in ("trained", "waiting", "left_out", "bad")}
    yield tiles(
        {
            name.replace("_", " "): "unknown" if each is None else f"{each:,.0f}"
            for name, each in counts.items()
        }
    )
    for name, title in (("waiting", "records that wait"), ("lag_s", "age of a step's oldest record, s")):
        points = _points(lines, name, x="step")
        yield chart(title, [Series(name=title, points=points)], "steps", _count, _plain, from_zero=True)


def _step_parts(records: RunRecords) -> Iterator[str]:
    measured = [numbers(line.get("step_seconds")) for line in records.of_kind("train")]
    measured = [each for each in measured if each]
    if not measured:
        yield unknown("Not known: only dlrm.train times the parts of a step.")
        if records.history is not None and records.history.step_s > 0:
            yield paragraph(f"A whole step takes {duration_text(records.history.step_s)} while no save runs.")
        return
    mean = {
        shown: fmean(each.get(name, 0.0) for each in measured)
        for name, shown in STEP_PARTS.items()
        if any(name in each for each in measured)
    }
    whole = sum(mean.values())
    yield paragraph(
        f"{duration_text(whole)} for a step on rank 0, the mean over {count_text(len(measured), 'line')} of "
        "metrics. Waiting for slower workers counts where it happens; on a GPU, this is the host's time."
    )
    names = list(STEP_PARTS.values())
    yield bar({name: max(0.0, each) for name, each in mean.items()}, whole, names)
    shares = {name: f"{duration_text(each)}, {_share(each, whole)}" for name, each in mean.items()}
    yield legend(shares, names)


def _saves(records: RunRecords) -> Iterator[str]:
    saves = records.saves
    yield from _saves_without_commit(records)
    if not saves:
        yield unknown("No committed save is recorded.")
        return
    rows = []
    for kind, shown in (("base", "everything"), ("rows", "some rows")):
        of_kind = [save for save in saves if save.kind == kind]
        if of_kind:
            rows.append((shown, f"{len(of_kind):,}", *_save_cells(_typical(of_kind))))
    head = ("bytes", "until the commit", "training waits", "slower steps besides")
    yield table(("medians over saves of", "number", *head), rows)
    waited_s = sum(save.blocked_s for save in saves)
    history = records.history
    share = (
        f", {share_text(waited_s / history.elapsed_s)} of the run" if history and history.elapsed_s else ""
    )
    yield paragraph(
        f"Training has waited {duration_text(waited_s)} for {count_text(len(saves), 'save')}{share}."
    )
    yield chart(
        "seconds",
        [
            Series(name="until the commit", points=[(s.step, s.seconds) for s in saves], marked=True),
            Series(name="training waits", points=[(s.step, s.blocked_s) for s in saves], marked=True),
        ],
        "training steps",
        _count,
        _plain,
        from_zero=True,
    )


def _saves_without_commit(records: RunRecords) -> Iterator[str]:
    if records.num_failed_saves:
        lines = records.of_kind("save_failed")
        newest = (
            f" The newest after step {lines[-1].get('step')}: {lines[-1].get('reason')}." if lines else ""
        )
        yield paragraph(f"{count_text(records.num_failed_saves, 'save')} failed.{newest}")
    if waits := records.uncommitted_saves:
        yield paragraph(
            f"{count_text(len(waits), 'save')} without a commit (failed, interrupted, or being written), the "
            f"newest of step {max(waits):,.0f}: until they had begun, training waited "
            f"{duration_text(sum(waits.values()))}. A save that is due while the one before is being written "
            "waits for that: if it often does, save less often."
        )


def _typical(saves: Sequence[SaveCost]) -> SaveCost:
    slowed = [save.slowed_s for save in saves if save.slowed_s is not None]
    return SaveCost(
        step=saves[-1].step,
        kind=saves[-1].kind,
        num_bytes=round(median(save.num_bytes for save in saves)),
        blocked_s=median(save.blocked_s for save in saves),
        seconds=median(save.seconds for save in saves),
        slowed_s=median(slowed) if slowed else None,
    )


def _save_cells(save: SaveCost) -> tuple[str, ...]:
    slowed = "unknown" if save.slowed_s is None else duration_text(save.slowed_s)
    return (size_text(save.num_bytes), duration_text(save.seconds), duration_text(save.blocked_s), slowed)


def _failures(records: RunRecords) -> Iterator[str]:
    failures = records.failures
    if not failures:
        is_known = records.history is not None or records.of_kind("train")
        yield paragraph("None.") if is_known else unknown("Not known.")
        return
    longest = max(sum(failure.seconds.values()) for failure in failures)
    yield paragraph(
        f"{count_text(len(failures), 'failure')}. A bar is the time from the end of the first worker to the "
        "first step of all, by phase, and all bars have one scale; time between two phases belongs to none."
    )
    yield legend(dict.fromkeys(PHASES, ""), PHASES)
    for count, failure in enumerate(failures, start=1):
        yield _failure(count, failure, longest)


def _failure(count: int, failure: FailureCost, longest: float) -> str:
    spent = {phase: failure.seconds[phase] for phase in PHASES if phase in failure.seconds}
    step = "" if failure.step is None else f" at step {failure.step:,}"
    after = f", {duration_text(failure.elapsed_s)} after the start" if failure.elapsed_s else ""
    whole = duration_text(sum(spent.values())) if spent else "of unknown length"
    phases = ", ".join(f"{phase} {duration_text(each)}" for phase, each in spent.items())
    rows = [f"{value:,} {ORIGINS[name]}" for name, value in failure.rows.items() if value and name in ORIGINS]
    added = "unknown" if failure.pls_added is None else f"{failure.pls_added:.6f}"
    facts = [
        f"{KINDS[failure.kind]}{f' ({failure.reason})' if failure.reason else ''}",
        *(f"ended: {each}" for each in failure.dead),
        *([f"rows: {', '.join(rows)}"] if rows else []),
        f"memory lost: {share_text(failure.lost_share)} of the tables; PLS added: {added}",
    ]
    return (
        f'<div class="failure"><h3>{text(f"Failure {count}{step}{after}: {whole}")}</h3>'
        f"{bar(spent, longest, PHASES)}"
        f"{paragraph(phases or 'The phases are not recorded.')}{bullets(facts)}</div>"
    )


def _pls(records: RunRecords) -> Iterator[str]:
    if records.pls is None:
        yield unknown(
            "Not known: nothing is recorded, or total_samples was not given to cpr.PartialRecovery. Runs "
            "without partial recovery lose no samples, as a resumed run goes back to its newest save."
        )
        return
    recovery = records.config.get("recovery")
    limit = number(recovery.get("max_pls")) if isinstance(recovery, Mapping) else None
    allowed = f" The run allows {limit:g} (recovery.max_pls)." if limit is not None and limit < 1 else ""
    yield paragraph(
        f"{records.pls:.6f} so far: samples trained since lost rows were saved, as a share of all samples "
        f"and nodes.{allowed}"
    )


def _advice(records: RunRecords) -> Iterator[str]:
    history = records.history
    if history is None:
        yield unknown(
            f"Not known: there is no history of saves and failures in {records.checkpoint}. "
            "cpr.PartialRecovery writes it (dlrm.train under torchrun --max-restarts, with "
            "checkpoint.every_steps)."
        )
        return
    command = f"cpr plan --run {records.checkpoint}"
    try:
        yield from _recommendation(history)
        yield paragraph(f"The same, with other targets and times: {command}")
    except ValueError as error:
        yield unknown(f"Nothing yet: {error}. For example: {command} --fail 24h")


def _recommendation(history: RunHistory) -> Iterator[str]:
    inputs = gather({}, [history])
    what = recommend(inputs.job)
    yield from (paragraph(line) for line in headline(what).splitlines())
    top, *rows = cost_table(what)
    yield table(top, rows)
    for title, sentences in explanations(what).items():
        if sentences:
            yield f"<h3>{text(title)}</h3>{bullets(sentences)}"
    yield f"<details><summary>It rests on</summary><pre>{text(inputs)}</pre></details>"


def _points(lines: Sequence[Line], name: str, x: str = "samples") -> list[Point]:
    pairs = ((number(line.get(x)), number(line.get(name))) for line in lines)
    return [(at, value) for at, value in pairs if at is not None and value is not None]


def _newest(records: RunRecords, name: str) -> str:
    found = [number(line.get(name)) for line in records.of_kind("evaluation")]
    return "unknown" if not found or found[-1] is None else f"{found[-1]:.4f}"


def _of(samples: float, total: int | None) -> str:
    return f" ({share_text(samples / total)})" if total else ""


def _share(part: float, whole: float) -> str:
    return share_text(part / whole) if whole > 0 else "unknown"


def _unit(seconds: float) -> tuple[str, float]:
    """A unit for an axis of so many seconds, and its seconds."""
    units = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next((each for each in units if seconds >= 3 * each[1]), ("seconds", 1.0))


def _count(value: float) -> str:
    """A count with three digits: 2.5k, 40M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
