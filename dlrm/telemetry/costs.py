"""What saves and recoveries cost a run, as lines of its metrics."""

from collections.abc import Iterator, Sequence

from cpr.estimator.history import SaveCost
from cpr.recovery.run.report import Recovery
from dlrm.telemetry.sinks import Figures


class Costs:
    """Makes lines of what is new; through restarts, no recovery becomes two."""

    def __init__(self) -> None:
        self.num_recoveries = 0
        """That have their line; a restarted run goes on with the number of its saved state."""

    def lines(
        self, saves: Sequence[SaveCost], recoveries: Sequence[Recovery]
    ) -> Iterator[tuple[str, int, Figures]]:
        """Kind, step and figures of lines.

        Args:
            saves: newly committed ones.
            recoveries: all of the run, oldest first.
        """
        for save in saves:
            figures = {"bytes": save.num_bytes, "seconds": save.seconds, "wait_seconds": save.blocked_s}
            yield "save", save.step, {save.kind: figures}
        for number, story in enumerate(recoveries, start=1):
            if number > self.num_recoveries:
                yield "recovery", story.step, _figures(number, story)
        self.num_recoveries = len(recoveries)


def _figures(number: int, story: Recovery) -> Figures:
    return {
        "recoveries": number,
        "how": story.kind,
        "seconds": sum(story.seconds.values()),
        "phases": dict(story.seconds),
        "lost_share": story.lost_share,
        "pls_added": story.pls_added,
        "pls": story.pls_total,
    }
