"""Times and trains whole models in the workers of `experiments.communication`."""

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from time import perf_counter
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
from dlrm.dense_sync.base import mean_over_ranks
from dlrm.dense_sync.selective import SelectiveSync
from dlrm.launch.device import Ranks
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.data import Inputs, prepare
from dlrm.training.evaluation import evaluate
from experiments.communication.contenders import CONTENDERS, LIMIT, Baseline, Contender
from experiments.communication.rounds import Effort, is_known
from experiments.communication.ways import register_hook
from experiments.harness.network import sent_bytes
from experiments.harness.training import NUM_SCALARS, MakeSynchronizer, Synchronizer, Training, of_rank_0
from experiments.splitting.workload import Workload as TerabyteWorkload

TOP_MLP: Final = (512, 256, 1)
"""Top MLP of the trained model; that of the `tiny` recipe is too small for compression to gain anything."""
SHARE_BATCHES: Final = 8
SHARE_STEPS: Final = 4
"""Steps of a turn."""
WARM_UP_STEPS: Final = 6
CPU: Final = torch.device("cpu")


class RecordedAuto:
    """A synchronizer with `auto` that records its decisions.

    Args:
        replicas: the synchronizer.
    """

    def __init__(self, replicas: AllReduceSync) -> None:
        self.replicas = replicas
        self.decisions: list[tuple[int, str]] = []
        """First step with each decision, and the name of its collective."""
        self._steps = 0
        self._chosen: str | None = None

    def average(self, scalars: Tensor) -> Tensor:
        """See `Synchronizer`."""
        return self.replicas.average(scalars)

    def updated(self, seconds: float) -> None:
        """See `Synchronizer`."""
        self.replicas.updated(seconds)
        self._steps += 1
        chosen = self.replicas.chosen
        if chosen is not None and chosen != self._chosen:
            self.decisions.append((self._steps, chosen))
        self._chosen = chosen

    def join(self) -> None:
        """See `Synchronizer`."""
        self.replicas.join()


class ScalarsOnly:
    """A synchronizer of scalars alone, for gradients that DDP averages or that are not exchanged."""

    def average(self, scalars: Tensor) -> Tensor:
        """Average the scalars over ranks."""
        return mean_over_ranks(scalars)

    def updated(self, seconds: float) -> None:
        """Do nothing."""

    def join(self) -> None:
        """Do nothing."""


def synchronizer_of(contender: Contender) -> MakeSynchronizer:
    """The synchronizer of a contender for the dense parameters of a whole model."""

    def synchronize(model: DistributedModelParallel, optimizers: Optimizers) -> Synchronizer:
        if isinstance(contender, Baseline):
            if contender is not Baseline.NOTHING:
                model.init_data_parallel()  # TorchRec wraps all parameters outside of tables in DDP
                wrapped = cast("DistributedDataParallel", model._dmp_wrapped_module)
                register_hook(wrapped, contender, DENSE_STEPS)
            return ScalarsOnly()
        parameters = dense_parameters(model)
        if contender.exchange == "selsync":
            return SelectiveSync(parameters, optimizers.dense, contender.sync_change, save_every_steps=0)
        replicas = AllReduceSync(parameters, NUM_SCALARS, contender)
        return RecordedAuto(replicas) if contender.exchange == "auto" else replicas

    return synchronize


def time_share(recipe: str, dataset: str, ranks: Ranks, effort: Effort) -> dict[str, Any]:
    """Time the steps of a whole model with and without the exchange of dense gradients.

    Args:
        recipe: `tiny` or `terabyte`.
        dataset: of `tiny`.
        ranks: this process and the others.
        effort: limits of rounds and time.

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
    synchronizers = {"dense": training.synchronizer, LIMIT: ScalarsOnly()}
    training.timed_steps(WARM_UP_STEPS)
    rounds: list[dict[str, float]] = []
    order, shuffled, began = sorted(synchronizers), Random(0), perf_counter()
    is_over = False
    while not is_over:
        shuffled.shuffle(order)
        rounds.append({})
        for name in order:
            training.synchronizer = synchronizers[name]
            training.timed_steps(1)  # untimed, since the other one has used the caches
            rounds[-1][name] = _timed(training, SHARE_STEPS) / SHARE_STEPS
        is_over = of_rank_0(is_known(rounds, "dense", LIMIT, effort, perf_counter() - began))
    num_values = sum(each.numel() for each in dense_parameters(training.model))
    del training
    gc.collect()  # the model holds reference cycles
    return {"rounds": rounds, "num_values": num_values}


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
        """Train a model from the first step to the last; a collective call.

        Args:
            name: of the contender.
            seed: of the initial weights and of the order of samples.

        Returns:
            `curve`: `samples`, `seconds` of training so far, `auc` and `log_loss` of each evaluation;
            `link_bytes`: bytes that left the busiest node in a step, embeddings included. Contenders of this
            project add figures of their exchanges, and `auto` its `decisions` (see `RecordedAuto`).
        """
        inputs, batches, tests = _samples(self, seed)
        training = Training(inputs, iter(batches), synchronize=synchronizer_of(CONTENDERS[name]))
        seconds, sent, curve = 0.0, 0, []
        for number in range(1, self.evaluations + 1):
            before = sent_bytes()
            seconds += _timed(training, self.steps * number // self.evaluations - training.steps_done)
            sent += sent_bytes() - before
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
        exchanged = _exchange_figures(training.synchronizer)
        del training
        gc.collect()
        return {"curve": curve, "link_bytes": max(every), **exchanged}


def _exchange_figures(synchronizer: Synchronizer) -> dict[str, Any]:
    """Figures of the exchanges of a contender of this project since its first step."""
    found: dict[str, Any] = {}
    if isinstance(synchronizer, RecordedAuto):
        found = {"decisions": synchronizer.decisions}
        synchronizer = synchronizer.replicas
    if not isinstance(synchronizer, AllReduceSync | SelectiveSync):
        return found
    figures = synchronizer.take_figures()
    if figures is not None:
        found |= {"collective": figures.name, "kept_share": figures.kept_share}
        found |= {"formula_bytes": figures.sent_bytes}
    return found


def _timed(training: Training, steps: int) -> float:
    """Make steps on all ranks and return their seconds, until parameters are synchronized."""
    dist.barrier()
    began = perf_counter()
    training.timed_steps(steps)
    training.synchronizer.join()
    dist.barrier()
    return perf_counter() - began


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
        batches = list(islice(_epochs(loader), num_batches))
    finally:
        inputs.close()
    return inputs, batches


def _epochs(loader: DataLoader) -> Iterator[Batch]:
    while True:
        yield from loader
