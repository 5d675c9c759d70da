"""Worker of `experiments.communication`, in a network namespace.

It serves five requests: `{"do": "share"}` times whole models, and `{"do": "train"}` trains one.
`{"do": "build"}` makes a dense part with its contenders, on which `{"do": "choose"}` has `auto` choose, and
`{"do": "time"}` times all contenders in turns.
"""

import gc
import warnings
from typing import Any

from dlrm.launch.device import Ranks
from experiments.communication.steps import StepTimer
from experiments.communication.whole import TrainingPlan, time_share
from experiments.harness.turns import Effort
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group


def main() -> int:
    """Serve the requests of the launcher."""
    warnings.filterwarnings("ignore")  # libraries warn at every start
    with worker_process_group() as ranks:
        answer_requests(ranks, Worker(job_from(None), ranks).answer)
    return 0


class Worker:
    """Holds one dense part with its contenders at a time; `job` has the fields of `TrainingPlan`."""

    def __init__(self, job: dict[str, Any], ranks: Ranks) -> None:
        self._trainings = TrainingPlan(**job["trainings"])
        self._ranks = ranks
        self._timer: StepTimer | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request, the same on all ranks."""
        gc.collect()  # models of earlier requests hold reference cycles
        match request:
            case {"do": "share", "recipe": recipe, "effort": effort}:
                return time_share(recipe, self._trainings.dataset, self._ranks, Effort(**effort))
            case {"do": "train", "contender": contender, "seed": seed}:
                return self._trainings.train(contender, seed)
            case {"do": "build", "model": model, "contenders": names}:
                self._build(model, names)
                return {}
            case {"do": "choose", "is_final": is_final} if self._timer is not None:
                return self._timer.choose(is_final)
            case {"do": "time", "effort": effort} if self._timer is not None:
                return self._timer.time(Effort(**effort))
        raise ValueError(f"unknown request {request}")

    def _build(self, model: str, names: list[str]) -> None:
        if self._timer is None or self._timer.model != model:
            self._timer = None
            gc.collect()  # contenders hold reference cycles, and two models do not fit in memory
            self._timer = StepTimer(model, names, self._ranks)


if __name__ == "__main__":
    raise SystemExit(main())
