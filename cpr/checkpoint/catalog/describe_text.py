"""Formats the description of a checkpoint directory as text that fits a screen."""

from collections.abc import Iterator, Sequence
from typing import Final

from cpr.checkpoint.catalog.describe import Description, SaveInfo, TableInfo
from cpr.checkpoint.ownership.records import Owner
from cpr.humanize import align_columns, count_text, duration_text, size_text

CHAIN_LINES: Final = 10
TABLE_LINES: Final = 30
"""Number of tables that are shown: the largest ones."""


def as_text(description: Description) -> str:
    """The text of `cpr describe`."""
    return "\n".join(_lines(description))


def _lines(about: Description) -> Iterator[str]:
    yield f"{about.uri}: {count_text(about.num_states, 'state')}, {size_text(about.num_bytes)}"
    yield f"owner   {_owner(about.owner)}"
    if about.chain:
        newest = about.chain[-1]
        yield f"run     {about.run_id}, {count_text(about.world_size or 0, 'rank')}"
        yield (
            f"newest  save {newest.sequence} at step {newest.step:,}, {newest.created} "
            f"({duration_text(max(0.0, newest.age_s))} ago)"
        )
        yield ""
        yield "Newest state: a base and the row saves upon it"
        yield from _chain(about.chain)
        if about.older:
            yield ""
            yield _older(about.older)
        yield ""
        yield from _tables(about.tables)
    else:
        yield "Nothing here can be loaded."
    if about.refused:
        yield ""
        yield "Saves that do not count"
        for save in about.refused:
            yield f"  {save.reason}"


def _chain(saves: Sequence[SaveInfo]) -> Iterator[str]:
    hidden = range(1, len(saves) - CHAIN_LINES + 2) if len(saves) > CHAIN_LINES else range(0)
    shown = [save for at, save in enumerate(saves) if at not in hidden]
    lines = align_columns(
        [
            ["save", "kind", "moment", "step", "size", "age", "codec"],
            *(
                [
                    str(save.sequence),
                    save.kind,
                    save.moment,
                    f"{save.step:,}",
                    size_text(save.num_bytes),
                    duration_text(max(0.0, save.age_s)),
                    _codec(save),
                ]
                for save in shown
            ),
        ],
        left={1, 2, 6},
    )
    if hidden:
        lines.insert(2, f"  ... {count_text(len(hidden), 'row save')} more (--json shows them)")
    yield from lines


def _codec(save: SaveInfo) -> str:
    if save.codec is None:
        return "no rows"
    error = f", off by {save.max_error:.2g} at most" if save.max_error else ""
    merged = f", merged from saves {save.merged[0]} to {save.merged[-1]}" if save.merged else ""
    return f"{save.codec}{error}{merged}"


def _older(saves: Sequence[SaveInfo]) -> str:
    steps = sorted({save.step for save in saves})
    span = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    num_bases = sum(save.kind == "base" for save in saves)
    num_bytes = sum(save.num_bytes for save in saves)
    kinds = f"{count_text(num_bases, 'base')} and {count_text(len(saves) - num_bases, 'row save')}"
    return f"Older: {kinds}, {span}, {size_text(num_bytes)}"


def _tables(tables: Sequence[TableInfo]) -> Iterator[str]:
    largest = sorted(tables, key=lambda table: table.weight_bytes, reverse=True)[:TABLE_LINES]
    shown = [table for table in tables if table in largest]
    yield from align_columns(
        [
            ["table", "rows", "dim", "dtype", "weights", "optimizer state", "steps behind"],
            *(
                [
                    table.fqn,
                    f"{table.rows:,}",
                    str(table.cols),
                    table.dtype,
                    size_text(table.weight_bytes),
                    ", ".join(f"{name} {size_text(size)}" for name, size in table.optimizer_state.items())
                    or "none",
                    _behind(table),
                ]
                for table in shown
            ),
        ],
        left={0, 3, 5},
    )
    if len(tables) > len(shown):
        yield f"  ... {count_text(len(tables) - len(shown), 'smaller table')} (--json shows them)"


def _behind(table: TableInfo) -> str:
    if table.newest_behind_steps == table.oldest_behind_steps:
        return f"{table.newest_behind_steps:,}"
    return f"{table.newest_behind_steps:,} to {table.oldest_behind_steps:,}"


def _owner(owner: Owner | None) -> str:
    if owner is None:
        return "none"
    if owner.finished is not None:
        return f"none: {owner} finished at step {owner.finished:,}"
    if owner.released:
        return f"none; last was {owner}"
    return f"{owner}, epoch {owner.epoch} (if that is gone, the next run takes it)"
