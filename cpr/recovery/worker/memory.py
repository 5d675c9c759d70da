"""Shared memory of a worker: segments of dead workers, claimed before the rendezvous, and its own."""

import logging
import os
import socket
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from cpr.errors import DamagedMemoryError, ResidentMemoryError
from cpr.processes import Process, launcher_of_this_worker
from cpr.rendezvous import HeldSegment, WorkerGroup, WorkerInfo
from cpr.resident.home import LAUNCH_VARIABLE, RUN_ID_VARIABLE, Home, run_key
from cpr.resident.layout import Layout
from cpr.resident.regions import patiently
from cpr.resident.segment import Segment

ALIVE: Final = "its owner is alive"

logger = logging.getLogger(__name__)


def launch_of_this_worker() -> str:
    """Identify the launch of this worker: the `cpr run` above it, or else the torchrun on this host.

    By its launches a run knows its own saves after a failure, and its own end. The session does not tell: a
    launch that loses all memory starts another session. Nor does `--rdzv-id`, which users choose again. A run
    on several nodes has several launches, of which one is enough. Empty if the launcher is gone.
    """
    launcher = launcher_of_this_worker()
    of_agent = f"{socket.gethostname()}-{launcher.pid}-{launcher.start_ticks}" if launcher else ""
    return os.environ.get(LAUNCH_VARIABLE) or of_agent


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A claimed segment of a dead worker: its layout, and how its owner ended."""

    segment: Segment
    layout: Layout
    generation: int
    """The last generation in which the owner trained, or tried to."""
    pid: int
    """The owner's process id."""
    left_ns: int
    """When the owner left by itself; -1: it was killed."""
    heartbeat_ns: int
    reason: str
    diverged: bool
    """Whether the owner, or one before, left because values were not finite."""
    launcher: Process
    """The process that would have restarted the owner."""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key, newest first. Steps count only within a generation: a later one may have gone back."""
        return -self.layout.generation, -self.segment.status.step_finished

    @classmethod
    def from_segment(cls, segment: Segment, layout: Layout) -> "Claimed":
        """Describe a claimed segment by its status page as of now."""
        status = segment.status
        return cls(
            segment=segment,
            layout=layout,
            generation=max(status.generation, layout.generation),
            pid=status.pid,
            left_ns=status.left_ns,
            heartbeat_ns=status.heartbeat_ns,
            reason=status.reason,
            diverged=status.diverged,
            launcher=Process(status.launcher_pid, status.launcher_start_ticks),
        )


class WorkerMemory:
    """The resident memory of this worker, in the folder of its run.

    Raises:
        ValueError, ResidentMemoryError: shared memory cannot be used; says what to change.
    """

    def __init__(self, uri: str, root: str | None) -> None:
        self.home = Home(run_key(uri), root)
        self.claimed: list[Claimed] = []
        """Best first."""
        self.refused: list[str] = []
        """Memory that was found and not claimed, with the reason."""
        self.segment: Segment | None = None
        """Segment of this worker's tables, after `settle`."""

    def claim(self) -> None:
        """Claim this worker's part of the segments that dead workers left on this node.

        The ranks alone decide which worker claims which segment, so that the workers of a node need not
        communicate. If the node has as many workers as before, each claims the segment of its own local rank,
        and gets the owner's rank if the node keeps its ranks.

        Raises:
            UnreadableMemoryError: some memory still cannot be read after repeated attempts, or was written by
                another version. It is kept and nothing is claimed, so that restarted workers try again.
        """
        rank = int(os.environ.get("RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for segment, layout in patiently(self._find):
            if (layout.rank - rank) % local_size == 0 and patiently(segment.claim):
                self.claimed.append(Claimed.from_segment(segment, layout))
        self.claimed.sort(key=lambda each: each.age)

    def _find(self) -> list[tuple[Segment, Layout]]:
        """Find memory that can be claimed, and note why other memory cannot."""
        found, refused = self.home.find()
        self.refused = [reason for reason in refused if not reason.endswith(ALIVE)]
        sealed = []
        for segment in found:
            try:
                if layout := segment.layout:
                    sealed.append((segment, layout))
            except DamagedMemoryError as error:
                self.refused.append(f"{segment.name}: {error}")
        return sealed

    def info(self) -> WorkerInfo:
        """Describe this worker and its claimed memory for the rendezvous."""
        return WorkerInfo(
            restarted=is_restarted(os.environ, {each.launcher for each in self.claimed}),
            host=socket.gethostname(),
            pid=os.getpid(),
            launch=launch_of_this_worker(),
            held=tuple(
                HeldSegment(
                    session_id=each.layout.session_id,
                    rank=each.layout.rank,
                    world_size=each.layout.world_size,
                    step_finished=each.segment.status.step_finished,
                    generation=each.generation,
                    epoch=each.segment.status.epoch,
                )
                for each in self.claimed
            ),
        )

    def settle(self, worker_group: WorkerGroup) -> Segment:
        """Drop memory of other sessions, and choose or create the segment of the new tables.

        Raises:
            ResidentMemoryError: another run may still need memory of another session.
        """
        for each in self.claimed:
            if each.layout.session_id != worker_group.session_id:
                self._drop_foreign(each)
        self.claimed = [each for each in self.claimed if each.layout.session_id == worker_group.session_id]
        mine = (worker_group.world_size, worker_group.rank)
        self.claimed.sort(key=lambda each: ((each.layout.world_size, each.layout.rank) != mine, each.age))
        self.segment = (
            self.claimed[0].segment if self.claimed else self.home.create(f"rank{worker_group.rank}")
        )
        self.segment.status.begin(worker_group.generation)
        return self.segment

    def _drop_foreign(self, claimed: Claimed) -> None:
        segment, launcher = claimed.segment, claimed.launcher
        if launcher.is_alive and launcher != launcher_of_this_worker():
            raise ResidentMemoryError(
                f"{segment.folder} is memory of another run of the same name and checkpoint "
                f"directory, and process {launcher.pid}, which restarts its workers, is alive. "
                "What to do: stop one of the two runs, or give it another --rdzv-id and directory"
            )
        if segment.is_unsaved:
            self.refused.append(f"{segment.name}: of a run that is over and was not saved; kept")
            segment.release()
        else:
            self.refused.append(f"{segment.name}: of a run that is over; removed")
            segment.remove()

    def drop_others(self) -> None:
        """Free all claimed memory but the segment of the tables."""
        for each in self.claimed:
            if each.segment is not self.segment:
                each.segment.remove()
        self.claimed = []

    def remove(self) -> None:
        """Free all memory of this worker, and the run's folder if this worker is the last."""
        self.drop_others()
        if self.segment is not None:
            self.segment.remove()
            self.segment = None
        self.home.remove()


def is_restarted(environment: Mapping[str, str], launchers: Set[Process]) -> bool:
    """Whether this worker knows that it continues a run.

    torchrun counts restarts after failures, but not those after a change of nodes. Then memory tells: the run
    continues if this worker's launcher has also launched an owner of the memory (`launchers`).
    """
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    if environment.get("CPR_CONTINUES") == "1":
        return True
    # Without torchrun the launcher may be a shell, from which a user started a new run.
    return RUN_ID_VARIABLE in environment and launcher_of_this_worker() in launchers
