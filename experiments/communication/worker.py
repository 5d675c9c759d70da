"""One worker of `experiments.communication`; started by it in a network namespace, not by people.

`{"do": "share"}` times whole models, `{"do": "train"}` trains one. `{"do": "build"}` makes a dense part with
its contenders; on that, `{"do": "choose"}` lets `auto` choose, and `{"do": "time"}` all of them take turns.
"""

import gc
import json
import logging
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.training.build import start_process_group
from experiments.communication.rounds import Effort
from experiments.communication.steps import Contest
from experiments.communication.whole import Trainings, time_share
from experiments.harness.workers import ANSWER


def main() -> int:
    """Do what is asked."""
    worker = Worker(json.loads(sys.argv[1]))
    for line in sys.stdin:
        answer = worker.answer(json.loads(line))
        if dist.get_rank() == 0:
            print(f"{ANSWER}{json.dumps(answer)}", flush=True)
    dist.destroy_process_group()
    return 0


class Worker:
    """Holds one dense part with its contenders at a time.

    Args:
        job: `trainings`, the fields of `Trainings`.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        for library in ("torchrec", "torch.fx"):
            logging.getLogger(library).setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")  # of libraries, at every start
        keep_freed_memory()
        self._trainings = Trainings(**job["trainings"])
        self._ranks = Ranks.from_environment()
        start_process_group(self._ranks, torch.device("cpu"))
        self._contest: Contest | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What came of it; all ranks are asked the same."""
        match request:
            case {"do": "share", "recipe": recipe, "effort": effort}:
                return time_share(recipe, self._trainings.dataset, self._ranks, Effort(**effort))
            case {"do": "train", "contender": contender, "seed": seed}:
                return self._trainings.train(contender, seed)
            case {"do": "build", "model": model, "contenders": names}:
                self._build(model, names)
                return {}
            case {"do": "choose"} if self._contest is not None:
                return self._contest.choose()
            case {"do": "time", "effort": effort} if self._contest is not None:
                return self._contest.time(Effort(**effort))
        raise ValueError(f"a worker cannot do {request}")

    def _build(self, model: str, names: list[str]) -> None:
        if self._contest is None or self._contest.model != model:
            self._contest = None
            gc.collect()  # contenders refer to each other; two models do not fit in memory
            self._contest = Contest(model, names, self._ranks)


if __name__ == "__main__":
    raise SystemExit(main())
