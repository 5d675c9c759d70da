"""Times and trains whole models in the workers of `experiments.communication`."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, cycle, islice, pairwise, repeat
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.batch import Batch
from data.loader import DataLoader
from dlrm.comm.autotune.tuner import DENSE_STEPS
from dlrm.config.recipe import load_config
from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.base import DenseSync, mean_over_ranks
from dlrm.dense_sync.selective import SelectiveSync
from dlrm.launch.device import Ranks
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.data import Inputs, prepare
from dlrm.training.evaluation import evaluate
from dlrm.training.trainer import NUM_SCALARS
from experiments.communication.contenders import AUTO_NAME, CONTENDERS, LIMIT, Baseline, Contender
from experiments.communication.ways import register_hook
from experiments.harness.training import MakeSynchronizer, Training
from experiments.harness.turns import Effort, Rounds, seconds_and_bytes_of, seconds_of, take_turns
from experiments.splitting.workload import TerabyteWorkload

TOP_MLP: Final = (512, 256, 1)
"""Top MLP of the trained model; that of the `tiny` recipe is too small for compression to gain anything."""
SHARE_BATCHES: Final = 8
SHARE_STEPS: Final = 4
"""Steps of a turn."""
WARM_UP_STEPS: Final = 6
CPU: Final = torch.device("cpu")


class ScalarsOnly(DenseSync):
    """Synchronizes scalars alone, for gradients that DDP averages or that are not exchanged."""

    def average(self, scalars: Tensor) -> Tensor:
        """Average the scalars over ranks."""
        return mean_over_ranks(scalars)

    def updated(self, seconds: float) -> None:
        """Do nothing."""

    def take_figures(self) -> None:
        """None, as there is no exchange."""


def synchronizer_of(contender: Contender) -> MakeSynchronizer:
    """The synchronizer of a contender for the dense parameters of a whole model."""

    def synchronize(model: DistributedModelParallel, optimizers: Optimizers) -> DenseSync:
        if isinstance(contender, Baseline):
            if contender is not Baseline.NOTHING:
                model.init_data_parallel()  # TorchRec wraps all parameters outside of tables in DDP
                wrapped = cast("DistributedDataParallel", model._dmp_wrapped_module)
                register_hook(wrapped, contender, DENSE_STEPS)
            return ScalarsOnly()
        parameters = dense_parameters(model)
        if contender.exchange == "selsync":
            return SelectiveSync(parameters, optimizers.dense, contender.sync_change, save_every_steps=0)
        return AllReduceSync(parameters, NUM_SCALARS, contender)

    return synchronize


def time_share(recipe: str, dataset: str, ranks: Ranks, effort: Effort) -> dict[str, Any]:
    """Time the steps of a recipe with and without the exchange of dense gradients; only `tiny` has data.

    Returns:
        `rounds`: seconds of a step with `dense` gradients exchanged, and with `nothing` but scalars;
            `num_values`: of a gradient.
    """
    if recipe == "tiny":
        inputs, batches = _of_dataset(dataset, seed=0, num_batches=SHARE_BATCHES, overrides=())
    else:
        workload = TerabyteWorkload()
        inputs = workload.inputs(workload.config("dlrm", "torchrec"), ranks)
        batches = workload.batches(ranks)
    training = Training(inputs, cycle(batches))
    synchronizers: dict[str, DenseSync] = {"dense": training.synchronizer, LIMIT: ScalarsOnly()}
    training.timed_steps(WARM_UP_STEPS)

    def turn(name: str) -> float:
        training.synchronizer = synchronizers[name]
        training.timed_steps(1)  # untimed, since the other one has used the caches
        return seconds_of(partial(_steps_of, training, SHARE_STEPS)) / SHARE_STEPS

    def remaining(rounds: Rounds, elapsed_s: float) -> Iterable[str]:
        return () if effort.is_enough(rounds, elapsed_s, "dense", [LIMIT]) else synchronizers

    rounds = take_turns(synchronizers, turn, remaining, effort.full_rounds)
    return {"rounds": rounds, "num_values": sum(each.numel() for each in dense_parameters(training.model))}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Settings that all trainings share."""

    dataset: str
    """Prepared data; its last day is for testing."""
    steps: int
    evaluations: int
    """Number of evaluations, evenly distributed; the last one is at the end."""
    test_batches: int
    """Number of batches of all ranks together, the first of the test day."""

    def train(self, name: str, seed: int) -> dict[str, Any]:
        """Train a model by a contender; the seed decides initial weights and order. A collective call.

        Returns:
            `curve`: `samples`, `seconds` of training so far, `auc` and `log_loss` of each evaluation;
            `link_bytes`: bytes that left the busiest node in a step, embeddings included. Contenders of this
            project add figures of their exchanges, and `auto` its decisions (see `decisions_of`).
        """
        inputs, batches, tests = _samples(self, seed)
        training = Training(inputs, iter(batches), synchronize=synchronizer_of(CONTENDERS[name]))
        chosen: list[str | None] = []
        seconds, sent, curve = 0.0, 0, []
        for number in range(1, self.evaluations + 1):
            steps = self.steps * number // self.evaluations - training.steps_done
            took_s, num_bytes = seconds_and_bytes_of(partial(_steps_of, training, steps, chosen))
            seconds, sent = seconds + took_s, sent + num_bytes
            found = evaluate(training.model, cast("DataLoader", tests), CPU)
            curve.append(
                {
                    "samples": training.steps_done * inputs.config.data.global_batch_size,
                    "seconds": seconds,
                    "auc": found.auc,
                    "log_loss": found.log_loss,
                }
            )
        every = [0.0] * dist.get_world_size()
        dist.all_gather_object(every, sent / self.steps)
        measured = {"curve": curve, "link_bytes": max(every)}
        if name == AUTO_NAME:
            measured["decisions"] = decisions_of(chosen)
        figures = training.synchronizer.take_figures()
        if figures is not None:
            measured |= {"collective": figures.name, "kept_share": figures.kept_share}
            measured["formula_bytes"] = figures.sent_bytes
        return measured


def decisions_of(chosen: Iterable[str | None]) -> list[tuple[int, str]]:
    """List the steps at which the choice of `auto` changed, each with the collective chosen from then on."""
    changes = enumerate(pairwise([None, *chosen]), start=1)
    return [(step, now) for step, (before, now) in changes if now is not None and now != before]


def _steps_of(training: Training, steps: int, chosen: list[str | None] | None = None) -> None:
    """Make steps, until parameters are synchronized; `chosen` takes what `auto` has chosen after each."""
    for _ in range(steps):
        training.step()
        if chosen is not None and isinstance(training.synchronizer, AllReduceSync):
            chosen.append(training.synchronizer.exchange.chosen)
    training.synchronizer.join()


@lru_cache(maxsize=1)
def _samples(plan: TrainingPlan, seed: int) -> tuple[Inputs, Sequence[Batch], Sequence[Batch]]:
    """Read all batches of a seed to train on and to test with, before any clock starts."""
    top = f"model.top_mlp={json.dumps(TOP_MLP)}"
    inputs, batches = _of_dataset(plan.dataset, seed, plan.steps, [top])
    _, tests = _of_dataset(plan.dataset, seed, plan.test_batches, [top], is_test=True)
    return inputs, batches, tests


def _of_dataset(
    dataset: str, seed: int, num_batches: int, overrides: Sequence[str], *, is_test: bool = False
) -> tuple[Inputs, list[Batch]]:
    settings = {
        "data.uri": json.dumps(str(Path(dataset))),
        "train.seed": seed,
        "train.device": "cpu",
        "train.precision": "fp32",
    }
    config = load_config("tiny", [*overrides, *(f"{name}={value}" for name, value in settings.items())])
    inputs = prepare(config, "tiny", Ranks.from_environment())
    try:
        loader = inputs.test_loader if is_test else inputs.loader
        batches = list(islice(chain.from_iterable(repeat(loader)), num_batches))
    finally:
        inputs.close()
    return inputs, batches
