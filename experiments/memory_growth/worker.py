"""Worker of `experiments.memory_growth`: runs `dlrm.train` and records the memory of the process.

torchrun starts it with the arguments `FOLDER EVERY_STEPS ARGUMENTS_OF_TRAIN...`. Each worker writes lines of
JSON to `FOLDER/RANK.jsonl`.
"""

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

import psutil

from dlrm import train
from dlrm.launch.malloc import ask_for_huge_pages
from dlrm.launch.process import leave


class MemoryRecorder:
    """Optimizer hook that records the memory of this process every few steps.

    Only the first optimizer that makes a step counts, because a training step has several optimizers.

    Args:
        sink: takes a line of JSON each time.
        every_steps: how often.
    """

    def __init__(self, sink: IO[str], every_steps: int) -> None:
        self._sink = sink
        self._every_steps = every_steps
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
        if self._step % self._every_steps == 0:
            info = self._process.memory_full_info()
            heap = psutil.heap_info()
            in_use = heap.heap_used + heap.mmap_used
            found = {"in_use_bytes": in_use, "rss_bytes": info.rss, "pss_bytes": info.pss}
            self._sink.write(json.dumps({"step": self._step, **found}) + "\n")
            self._sink.flush()


def main() -> int:
    """Train with the recorder; returns the exit code of `dlrm.train`."""
    folder, every_steps = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
    ask_for_huge_pages()
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415  # torch reads the setting when it is imported

    with (folder / f"{os.environ['RANK']}.jsonl").open("w") as sink:
        register_optimizer_step_post_hook(MemoryRecorder(sink, every_steps))
        return train.main()


if __name__ == "__main__":
    leave(main())
