"""Worker of `experiments.checkpointing`.

The memory pass is asked for first: every saver alone, after free memory was returned to the system, so that
its needs show. Before the first timed round comes a warm-up pass; from then on the memory of all savers is
warm, as from the second save of a real run on.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.checkpointing.bench import Bench
from experiments.checkpointing.job import TrainingJob, start_training
from experiments.harness.record import Row
from experiments.harness.worker_process import answer_requests, job_from, worker_process_group

WARM_UP_STEPS: Final = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for."""
    request = job_from(arguments)
    job = TrainingJob(**request["job"])
    with worker_process_group(keeps_memory=False) as ranks:  # the launcher's environment decides that
        training = start_training(job, ranks)
        training.timed_steps(WARM_UP_STEPS)
        bench = Bench(job, training, Path(request["scratch"]), ranks.rank)

        def answer(asked: Row) -> Row:
            if "round" not in asked:
                return bench.memory_pass()
            bench.warm_up()
            return {**asked, **bench.round(backwards=asked["round"] % 2 == 1)}

        answer_requests(ranks, answer)
        bench.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
