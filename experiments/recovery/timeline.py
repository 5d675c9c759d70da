"""The moments of a worker's restart in experiments on recovery, JSON lines in a file that all workers share.

This module imports nothing heavy, so that the first moment is the interpreter's start of the worker.
"""

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

Mark = dict[str, Any]

EVENTS: Final = ("started", "imported", "met", "built", "restored", "stepped")
"""In order: the process runs; has its modules, its group, its model, the model's values; has done a step."""


def mark(path: Path, event: str, **more: Any) -> None:
    """Append that `event` has happened now in this worker, in one write that no other worker's can split."""
    line = {
        "event": event,
        "time": time.time(),
        "rank": int(os.environ.get("RANK", "0")),
        "generation": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "pid": os.getpid(),
        **more,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_marks(path: Path) -> list[Mark]:
    """All marks so far, in the order of writing; a line that is being written is left for the next time."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def have_all(marks: Iterable[Mark], event: str, generation: int, world_size: int) -> bool:
    """Whether every rank of a generation has reached `event`."""
    ranks = {each["rank"] for each in marks if each["event"] == event and each["generation"] == generation}
    return len(ranks) == world_size


def phases(
    marks: Iterable[Mark], generation: int, killed_at: float, events: Sequence[str] = EVENTS
) -> dict[str, float]:
    """Seconds from one of the `events` to the next, each counted when the last rank has reached it.

    The sum is the time from the kill to the end of the first new step on all ranks.
    """
    mine = [each for each in marks if each["generation"] == generation]
    took, before = {}, killed_at
    for event in events:
        reached = max(each["time"] for each in mine if each["event"] == event)
        took[event] = reached - before
        before = reached
    return took
