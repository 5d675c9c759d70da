"""What this worker holds in shared memory: claimed before the workers meet, home of its new tables after."""

import logging
import os
import socket
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from cpr.errors import DamagedMemoryError, ResidentMemoryError
from cpr.processes import Process, launcher_of_this_worker
from cpr.recovery.worker.launch_id import launch_of_this_worker
from cpr.rendezvous import HeldSegment, WorkerGroup, WorkerInfo
from cpr.resident.home import RUN_ID_VARIABLE, Home, run_key
from cpr.resident.layout import Layout
from cpr.resident.regions import patiently
from cpr.resident.segment import Segment

ALIVE: Final = "its owner is alive"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """A segment of a dead worker that is this worker's now, what was sealed in it, and its last words."""

    segment: Segment
    layout: Layout
    generation: int
    """The last in which its owner was, or tried to be."""
    pid: int
    """The owner's."""
    left_ns: int
    """When it left of its own accord; -1: it did not."""
    heartbeat_ns: int
    reason: str
    diverged: bool
    """Whether that, or an owner before, left because values were no numbers."""
    launcher: Process
    """What would have started the owner again."""

    @property
    def age(self) -> tuple[int, int]:
        """The smaller, the newer. Steps count only within a generation: a later one may have gone back."""
        return -self.layout.generation, -self.segment.status.step_finished

    @classmethod
    def from_segment(cls, segment: Segment, layout: Layout) -> "Claimed":
        """A claimed segment, with the last words of its owner as they are now."""
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
    """The resident memory of this worker.

    Args:
        uri: of the checkpoint directory; part of the run's key.
        root: a memory file system; None: the usual one.

    Raises:
        ValueError, ResidentMemoryError: shared memory cannot be used; says what to change.
    """

    def __init__(self, uri: str, root: str | None) -> None:
        self.home = Home(run_key(uri), root)
        self.claimed: list[Claimed] = []
        """Best first."""
        self.refused: list[str] = []
        """What was found and not claimed, with the reason."""
        self.segment: Segment | None = None
        """Where the tables of this worker live."""

    def claim(self) -> None:
        """Claim the segments that fall to this worker.

        Which ones is decided by their ranks alone, so that the workers of a node need not talk about it:
        each segment falls to exactly one of them. Where the node has as many workers as before, that is the
        one with the local rank of its owner, which gets the owner's rank if the node keeps its ranks.

        Raises:
            UnreadableMemoryError: some memory cannot be read, though it was tried again for a while, or was
                written by another version. It is kept, and nothing is claimed: workers that are restarted try
                again, rather than go on without it.
        """
        rank = int(os.environ.get("RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        for segment, layout in patiently(self._find):
            if (layout.rank - rank) % local_size == 0 and patiently(segment.claim):
                self.claimed.append(Claimed.from_segment(segment, layout))
        self.claimed.sort(key=lambda each: each.age)

    def _find(self) -> list[tuple[Segment, Layout]]:
        """Memory that can be claimed; why other memory cannot is noted."""
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
        """What this worker brings to the meeting."""
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
        """Drop what is not of this session; the segment that the new tables live in, made if need be.

        Raises:
            ResidentMemoryError: another run may still need what is not of this session.
        """
        for each in self.claimed:
            if each.layout.session_id != worker_group.session_id:
                if each.launcher.is_alive and each.launcher != launcher_of_this_worker():
                    raise ResidentMemoryError(
                        f"{each.segment.folder} is memory of another run of the same name and checkpoint "
                        f"directory, and process {each.launcher.pid}, which restarts its workers, is alive. "
                        "What to do: stop one of the two runs, or give it another --rdzv-id and directory"
                    )
                if each.segment.is_unsaved:
                    self.refused.append(f"{each.segment.name}: of a run that is over and was not saved; kept")
                    each.segment.release()
                    continue
                self.refused.append(f"{each.segment.name}: of a run that is over; removed")
                each.segment.remove()
        self.claimed = [each for each in self.claimed if each.layout.session_id == worker_group.session_id]
        mine = (worker_group.world_size, worker_group.rank)
        self.claimed.sort(key=lambda each: ((each.layout.world_size, each.layout.rank) != mine, each.age))
        self.segment = (
            self.claimed[0].segment if self.claimed else self.home.create(f"rank{worker_group.rank}")
        )
        self.segment.status.begin(worker_group.generation)
        return self.segment

    def drop_others(self) -> None:
        """Free what was claimed and is not needed any more: all but the segment of the tables."""
        for each in self.claimed:
            if each.segment is not self.segment:
                each.segment.remove()
        self.claimed = []

    def remove(self) -> None:
        """Free everything of this worker, and the run's folder if it was the last."""
        self.drop_others()
        if self.segment is not None:
            self.segment.remove()
            self.segment = None
        self.home.remove()


def is_restarted(environment: Mapping[str, str], launchers: Set[Process]) -> bool:
    """Whether this worker knows that it continues a run.

    torchrun counts restarts after failures, but not those after a change of nodes; then memory tells, if what
    started its owner has started this worker as well.

    Args:
        environment: of this worker.
        launchers: of the owners of the memory that it found.
    """
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        return True
    if environment.get("CPR_CONTINUES") == "1":
        return True
    # without torchrun the launcher is a shell, say, from which a new run was started by hand
    return RUN_ID_VARIABLE in environment and launcher_of_this_worker() in launchers
