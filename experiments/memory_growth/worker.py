"""One worker of `experiments.memory_growth`: `dlrm.train`, which writes down its memory as it goes.

Started by torchrun, not by people: `memory_worker FOLDER ARGUMENTS_OF_TRAIN...`. Each worker writes lines of
JSON to `FOLDER/RANK.jsonl`.
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
"""Its fields in order."""


class Mallinfo2(ctypes.Structure):
    """As the C library declares it (`man mallinfo2`); all in bytes, or numbers of blocks."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO2)


def bytes_in_use() -> int:
    """What this process has allocated of the C library, in all arenas and in mapped blocks, and not freed.

    Tensors are in there, and what NumPy, Arrow and others hold through `malloc`; Python's small objects are
    not: they lie in memory that Python maps itself, and show in the resident set.

    Raises:
        RuntimeError: the C library cannot tell; glibc can since 2.33.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        raise RuntimeError("this C library does not tell what it has given out; glibc 2.33 or newer does")
    mallinfo2.restype = Mallinfo2
    told = mallinfo2()
    return int(told.uordblks + told.hblkhd)


class Watch:
    """Writes down the memory of this process at every so many steps of the first optimizer that steps.

    Args:
        sink: takes a line each time.
    """

    def __init__(self, sink: IO[str]) -> None:
        self._sink = sink
        self._process = psutil.Process()
        self._optimizer: Any = None
        self._step = 0

    def __call__(self, optimizer: Any, *_: Any) -> None:
        """After a step of any optimizer."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._step += 1
        if self._step % EVERY_STEPS == 0:
            told = self._process.memory_full_info()
            found = {"in_use_bytes": bytes_in_use(), "rss_bytes": told.rss, "pss_bytes": told.pss}
            self._sink.write(json.dumps({"step": self._step, **found}) + "\n")
            self._sink.flush()


def main() -> int:
    """Train, watched; the exit code of `dlrm.train`."""
    folder = Path(sys.argv.pop(1))
    ask_for_huge_pages()
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415  # not before that

    with (folder / f"{os.environ['RANK']}.jsonl").open("w") as sink:
        register_optimizer_step_post_hook(Watch(sink))
        return train.main()


if __name__ == "__main__":
    leave(main())
