"""Stores the strategies of a run's heads in the run folder, so that a restarted run uses the same ones.

A restarted run must not move its tables because a link was busy, and split heads with weights have other
parameters, so that saved states fit no other strategy.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final, get_args

from dlrm.launch.device import of_rank_0
from dlrm.launch.files import write_json
from dlrm.sharding.splitting.planning.strategies import Strategy

CHOICE_NAME: Final = "sharding.json"
"""File in a run folder."""
IN_TABLES: Final[frozenset[Strategy]] = frozenset({"split", "two_level"})
"""Strategies under which the weights of a head lie in tables."""


def load_choice(folder: Path | None) -> dict[str, Strategy] | None:
    """Read the strategies by head path, or None if none are stored; a collective.

    Raises:
        ValueError: on all ranks, if the file is damaged.
    """
    return of_rank_0(lambda: None if folder is None else _read(folder / CHOICE_NAME))


def _read(file: Path) -> dict[str, Strategy] | None:
    if not file.exists():
        return None
    try:
        found = {path: head["strategy"] for path, head in json.loads(file.read_text())["heads"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} does not say which strategy each head has ({error!r}); put it back as it was"
        ) from error
    known = get_args(Strategy)
    for path, strategy in found.items():
        if strategy not in known:
            raise ValueError(
                f"{file} gives {path} the strategy {strategy!r}; known strategies are {', '.join(known)}"
            )
    return found


def save_choice(
    folder: Path, strategies: Mapping[str, Strategy], reasons: Mapping[str, str], by: str
) -> None:
    """Write the strategies on rank 0, with reasons and the way of choosing (`by`) for people."""
    heads = {
        path: {"strategy": strategy} | ({"reason": reasons[path]} if path in reasons else {})
        for path, strategy in strategies.items()
    }
    write_json(folder / CHOICE_NAME, {"by": by, "heads": heads})


def check_choice(
    known: Mapping[str, Strategy], strategies: Mapping[str, Strategy], with_weights: Collection[str]
) -> None:
    """Refuse strategies (by head path) that do not fit the ones `known` from the start of the run.

    Raises:
        ValueError: a head in `with_weights` has other parameters now than what the run has saved.
    """
    for path in with_weights:
        before, now = known.get(path, "exchange"), strategies[path]
        if (before in IN_TABLES) != (now in IN_TABLES):
            raise ValueError(
                f"this run began with the strategy {before!r} for {path}, whose weights are saved "
                f"{'in tables' if before in IN_TABLES else 'whole'} then, and would continue with {now!r}: "
                "resume it with the sharding.strategy that it began with, where that is possible"
            )
