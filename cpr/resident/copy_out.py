"""Copies tables that do not live in shared memory, such as those of a GPU, there when the worker must end.

A separate thread copies, because the main thread may hang in a broken collective. A copy counts only for the
training step in which it was made.

The memory for the copies is claimed at the start, and page-locked for GPUs: at the end there is no time to
look for any, and all workers of a node copy at once.
"""

import ctypes
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from cpr.humanize import size_text
from cpr.resident.segment import Segment
from cpr.shards.shard import TableShard

SETTLE_S: Final = 2.0
"""How long to wait for queued work of a GPU before the copy; in a broken collective it never finishes."""
YIELD_S: Final = 1.0
"""How long the main thread has, after the copy, to end the process by itself."""
ABORT_S: Final = 120.0
"""How long an abort waits for the copy; below the time after which PyTorch misses NCCL's watchdog."""
TEAR_DOWN: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
CLEANS_UP: Final = frozenset({"1", "2"})
"""Values of it with which PyTorch first aborts the failed collective: GPUs then compute, and update tables,
with what it has left in the buffers."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class CopyOut:
    """Copies the shards of this rank that would not survive this process.

    `seal` calls `segment.seal` with the shards that it is given.
    """

    segment: Segment
    shards: Sequence[TableShard]
    seal: Callable[[Sequence[TableShard]], object]
    _alone: threading.Lock = field(default_factory=threading.Lock)
    _streams: dict[torch.device, Any] = field(default_factory=dict)
    _pinned: list[Tensor] = field(default_factory=list)
    _is_final: bool = False
    """Whether the end of training was copied."""

    def __post_init__(self) -> None:
        self._inside = [shard for shard in self.shards if self.segment.holds(shard)]
        self.outside = [s for s in self.shards if not s.replicated and not self.segment.holds(s)]
        """Shards that end with this process, unless they are copied."""
        self._token = secrets.token_hex(4)
        for device in sorted({shard.weights.device for shard in self.outside}, key=str):
            if device.type == "cuda":
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that the copies take."""
        return sum(tensor.nbytes for shard in self.outside for tensor in shard.columns.values())

    def reserve(self) -> None:
        """Claim the shared memory that the copies take, and page-lock what GPUs are to write.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        for number, shard in enumerate(self.outside):
            for column, tensor in shard.columns.items():
                region = self._region(self._name(number, column), tensor)
                if tensor.device.type == "cuda" and region.nbytes:
                    self._pin(region)
        if self._streams and os.environ.get(TEAR_DOWN) in CLEANS_UP:
            logger.warning(
                "%s=%s lets GPUs go on with wrong values after a collective has failed, before tables are "
                "copied: unset it",
                TEAR_DOWN,
                os.environ[TEAR_DOWN],
            )

    def close(self) -> None:
        """Undo the page-locking, before the memory goes."""
        while self._pinned:
            _cudart().cudaHostUnregister(self._pinned.pop().data_ptr())

    def _pin(self, region: Tensor) -> None:
        error = int(_cudart().cudaHostRegister(region.data_ptr(), region.nbytes, 0))
        if error:
            logger.warning(
                "%s of shared memory cannot be page-locked (CUDA error %d; see `ulimit -l`): when this "
                "worker must end, tables are copied there more slowly",
                size_text(region.nbytes),
                error,
            )
        else:
            self._pinned.append(region)

    def run(self) -> None:
        """Copy the shards, note their digests, and seal; after `finish` there is nothing to do.

        Not called by the main thread, which may train meanwhile.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        if not self.outside:
            return
        with self._alone:
            if not self._is_final:
                self._make()

    def finish(self) -> None:
        """Copy as `run` does; called by the main thread, when it trains no more.

        Here, too, a separate thread copies, while the main thread waits. If it receives SIGTERM meanwhile,
        its handler waits until `run`, which `SigtermHook` calls, has found this copy complete.

        Raises:
            NotEnoughMemoryError: there is no room.
        """
        if self.outside:
            with ThreadPoolExecutor(1, "cpr-copy-out") as executor:
                executor.submit(self._make_last).result()

    def _make_last(self) -> None:
        with self._alone:
            self._make()
            self._is_final = True

    def _make(self) -> None:
        self.seal(self.shards)  # an earlier copy, which is about to be overwritten, no longer counts
        while True:
            moment = self.segment.status.update_begun
            copies = self._copy()
            if self.segment.status.update_begun == moment:
                break
        self.segment.forget_changes()  # which are not those of the rows in the copies
        self.seal([*self._inside, *copies])

    def _copy(self) -> list[TableShard]:
        copies, names = [], []
        with ExitStack() as streams, torch.no_grad():
            for device, stream in self._streams.items():
                _settle(device)
                streams.enter_context(torch.cuda.stream(stream))
            for number, shard in enumerate(self.outside):
                shard.flush()
                columns = {}
                for column, tensor in shard.columns.items():
                    name = self._name(number, column)
                    columns[column] = self._region(name, tensor).copy_(tensor)
                    names.append(name)
                weights = columns.pop("weights")
                copies.append(replace(shard, weights=weights, optimizer_state=columns))
        for name in names:
            self.segment.set_digest(name)
        return copies

    def _name(self, number: int, column: str) -> str:
        return f"copy-{self._token}-{number}-{column}"

    def _region(self, name: str, tensor: Tensor) -> Tensor:
        return self.segment.region(name, tensor.dtype, tensor.numel()).view(tensor.shape)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _settle(device: torch.device) -> None:
    """Wait for what is queued on a GPU, up to `SETTLE_S`."""
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.default_stream(device))
    deadline = time.monotonic() + SETTLE_S
    while not done.query() and time.monotonic() < deadline:
        time.sleep(0.001)


_LIBC: Final = ctypes.CDLL(None)
_LIBC.signal.restype, _LIBC.signal.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
_HANDLER: Final = ctypes.CFUNCTYPE(None, ctypes.c_int)


class ExitHook:
    """Runs work before the process ends, when it receives SIGTERM or aborts during the block.

    A thread does the work: it learns of the signal even while the main thread hangs outside of Python. Then
    the signal has its usual effect. If that would end the process and the main thread hangs, the thread ends
    the process. Enter and leave the block in the main thread.

    A process aborts (SIGABRT) when PyTorch's watchdog of NCCL finds that a collective has failed or takes too
    long. Python's own handlers would run too late: C's `abort` ends the process as soon as the handler has
    returned. So the handler is a C function made by ctypes, which waits in the thread that aborts.

    Args:
        work: what to do.
        loss: what is lost if it fails, for the log.
    """

    def __init__(self, work: Callable[[], object], loss: str = "nothing") -> None:
        self._work, self._loss = work, loss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="cpr-exit-hook", daemon=True)
        self._abort_handler = _HANDLER(self._on_abort)  # referred to as long as C may call it

    def __enter__(self) -> "ExitHook":
        self._pid = os.getpid()
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._previous_pipe = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        handler = ctypes.cast(self._abort_handler, ctypes.c_void_p)
        self._previous_abort = _LIBC.signal(signal.SIGABRT, handler)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _LIBC.signal(signal.SIGABRT, self._previous_abort)
        signal.signal(signal.SIGTERM, self._previous)
        signal.set_wakeup_fd(self._previous_pipe)
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)

    def _wait(self) -> None:
        while signals := os.read(self._reading, 64):
            aborts = signal.SIGABRT in signals
            if not aborts and signal.SIGTERM not in signals:
                continue
            try:
                self._work()
            except Exception:
                logger.exception(
                    "tables outside of shared memory could not be copied there; lost with this worker: %s",
                    self._loss,
                )
            self._done.set()
            if self._previous == signal.SIG_DFL and not aborts:
                time.sleep(YIELD_S)
                os._exit(128 + signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._done.wait()
        if callable(self._previous):
            self._previous(signum, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def _on_abort(self, signum: int) -> None:
        """Have the work done before the thread that called this, by an abort, goes on with it."""
        if os.getpid() == self._pid:  # and not in a fork, which has the same pipe
            os.write(self._writing, bytes([signal.SIGABRT]))
            if not self._done.wait(ABORT_S):
                logger.error("the copy took longer than %g s; lost: %s", ABORT_S, self._loss)
        _LIBC.signal(signal.SIGABRT, self._previous_abort)
        getattr(_LIBC, "raise")(signal.SIGABRT)  # once this handler has returned, for the handler before it
