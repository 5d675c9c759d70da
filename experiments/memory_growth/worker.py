"""Worker of `experiments.memory_growth`: runs `dlrm.train` and records the memory of the process.

torchrun starts it with the arguments `FOLDER ARGUMENTS_OF_TRAIN...`. Each worker writes lines of JSON to
`FOLDER/RANK.jsonl`.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import IO, Any, Final

import psutil

from dlrm import train
from dlrm.launch.malloc import ask_for_huge_pages
from dlrm.launch.process import leave

EVERY_STEPS: Final = 20
MALLINFO2: Final = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
"""Fields of the C structure, in order."""


class Mallinfo2(ctypes.Structure):
    """The structure that the C library returns (`man mallinfo2`): bytes and numbers of blocks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO2)


def bytes_in_use() -> int:
    """Bytes that this process has allocated from the C library and not freed.

    They include tensors and the memory that NumPy, Arrow and others get from `malloc`, but not Python's small
    objects, which are in memory that Python maps itself.

    Raises:
        RuntimeError: the C library has no `mallinfo2`; glibc has it since 2.33.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        raise RuntimeError(
            "this C library does not report the memory in use (mallinfo2); glibc does since 2.33"
        )
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class MemoryRecorder:
    """Optimizer hook that records the memory of this process every `EVERY_STEPS` steps.

    Only the first optimizer that makes a step counts, because a training step has several optimizers.

    Args:
        sink: takes a line of JSON each time.
    """

    def __init__(self, sink: IO[str]) -> None:
        self._sink = sink
        self._process = psutil.Process()
        self._optimizer: Any = None
        self._step = 0

    def __call__(self, optimizer: Any, *_: Any) -> None:
        """Called after a step of any optimizer."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._step += 1
        if self._step % EVERY_STEPS == 0:
            info = self._process.memory_full_info()
            found = {"in_use_bytes": bytes_in_use(), "rss_bytes": info.rss, "pss_bytes": info.pss}
            self._sink.write(json.dumps({"step": self._step, **found}) + "\n")
            self._sink.flush()


def main() -> int:
    """Train with the recorder; returns the exit code of `dlrm.train`."""
    folder = Path(sys.argv.pop(1))
    ask_for_huge_pages()
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415  # torch reads the setting when it is imported

    with (folder / f"{os.environ['RANK']}.jsonl").open("w") as sink:
        register_optimizer_step_post_hook(MemoryRecorder(sink))
        return train.main()


if __name__ == "__main__":
    leave(main())
