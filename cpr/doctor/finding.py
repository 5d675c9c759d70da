"""The result of one check: a line that says ok, or what to change."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    """Name of the check, such as `shared memory`."""
    text: str
    """What was found, and what to change."""
    state: Literal["ok", "warning", "PROBLEM"] = "ok"
    """With a warning a job runs, slowly or at a risk; with a problem it fails."""

    def __str__(self) -> str:
        return f"{self.state:<7}  {self.check}: {self.text}"


def problem(check: str, text: str, advice: str) -> Finding:
    """A finding with which a job fails."""
    return Finding(check, f"{text}. What to do: {advice}", "PROBLEM")


def warning(check: str, text: str, advice: str) -> Finding:
    """A finding with which a job runs, slowly or at a risk."""
    return Finding(check, f"{text}. What to do: {advice}", "warning")
