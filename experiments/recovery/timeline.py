"""When a worker of `experiments.recovery` reached what, as lines of JSON that all workers append to one file.

It is imported before anything heavy: the first event is that the interpreter runs the worker's module.
"""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

Event = dict[str, Any]

EVENTS: Final = ("started", "imported", "met", "built", "restored", "stepped")
"""In order: the process runs, has its modules, its group, its model, the model's values, and a step done."""


class Timeline:
    """Appends the events of one worker process.

    Args:
        path: of the file, shared by all workers of a run on one machine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def mark(self, event: str, **more: Any) -> None:
        """Note that `event` has come about now, in one write that no other worker's can split."""
        line = {
            "event": event,
            "time": time.time(),
            "rank": int(os.environ.get("RANK", "0")),
            "generation": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            "pid": os.getpid(),
            **more,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_events(path: Path) -> list[Event]:
    """All events so far, in the order of writing; a line that is being written is left for the next time."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def have_all(events: Iterable[Event], event: str, generation: int, world_size: int) -> bool:
    """Whether every rank of a generation has reached `event`."""
    ranks = {each["rank"] for each in events if each["event"] == event and each["generation"] == generation}
    return len(ranks) == world_size


def phases(events: Iterable[Event], generation: int, killed_at: float) -> dict[str, float]:
    """Seconds from one event to the next, each counted when the last rank has reached it.

    The sum is the time from the kill to the end of the first new step on all ranks.
    """
    mine = [each for each in events if each["generation"] == generation]
    took, before = {}, killed_at
    for event in EVENTS:
        reached = max(each["time"] for each in mine if each["event"] == event)
        took[event] = reached - before
        before = reached
    return took
