"""Whole models for `experiments.communication`, in its workers: the dense exchange's share, and trainings."""

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
from experiments.communication.contenders import CONTENDERS, LIMIT, Contender, Rival
from experiments.communication.rounds import Effort, is_known
from experiments.communication.ways import register_hook
from experiments.harness.network import sent_bytes
from experiments.harness.training import NUM_SCALARS, Keep, Keeper, Training, of_rank_0
from experiments.splitting.workload import Workload as TerabyteWorkload

TOP_MLP: Final = (512, 256, 1)
"""Of the model that is trained: the `tiny` recipe's is so small that nothing is worth compressing."""
SHARE_BATCHES: Final = 8
SHARE_STEPS: Final = 4
"""Of a turn."""
WARM_UP_STEPS: Final = 6
CPU: Final = torch.device("cpu")


class Watched:
    """Keeps parameters alike as `auto` does, and remembers when that has decided.

    Args:
        replicas: that do it.
    """

    def __init__(self, replicas: AllReduceSync) -> None:
        self.replicas = replicas
        self.decisions: list[tuple[int, str]] = []
        """The first step that was made as decided, and the collective's name; again whenever that changed."""
        self._steps = 0
        self._chosen: str | None = None

    def average(self, scalars: Tensor) -> Tensor:
        """See `Keeper`."""
        return self.replicas.average(scalars)

    def updated(self, seconds: float) -> None:
        """See `Keeper`."""
        self.replicas.updated(seconds)
        self._steps += 1
        chosen = self.replicas.chosen
        if chosen is not None and chosen != self._chosen:
            self.decisions.append((self._steps, chosen))
        self._chosen = chosen

    def join(self) -> None:
        """See `Keeper`."""
        self.replicas.join()


class ByOthers:
    """Gradients are DDP's affair, or nobody's: only scalars travel here."""

    def average(self, scalars: Tensor) -> Tensor:
        """Their means."""
        return mean_over_ranks(scalars)

    def updated(self, seconds: float) -> None:
        """Nothing."""

    def join(self) -> None:
        """Nothing."""


def keep_as(contender: Contender) -> Keep:
    """Keeps the dense parameters of a whole model alike in a contender's way."""

    def keep(model: DistributedModelParallel, optimizers: Optimizers) -> Keeper:
        if isinstance(contender, Rival):
            if contender is not Rival.NOTHING:
                model.init_data_parallel()  # TorchRec's own, over all that is no table
                wrapped = cast("DistributedDataParallel", model._dmp_wrapped_module)
                register_hook(wrapped, contender, DENSE_STEPS)
            return ByOthers()
        parameters = dense_parameters(model)
        if contender.exchange == "selsync":
            return SelectiveSync(parameters, optimizers.dense, contender.sync_change, save_every_steps=0)
        replicas = AllReduceSync(parameters, NUM_SCALARS, contender)
        return Watched(replicas) if contender.exchange == "auto" else replicas

    return keep


def time_share(recipe: str, dataset: str, ranks: Ranks, effort: Effort) -> dict[str, Any]:
    """What the dense exchange takes of a step of a whole model, as it is trained.

    Args:
        recipe: `tiny` or `terabyte`.
        dataset: of `tiny`.
        ranks: this process and the others.
        effort: allowed.

    Returns:
        `rounds`: seconds of a step with `dense` gradients exchanged, and with `nothing` but scalars.
    """
    if recipe == "tiny":
        inputs, batches = _of_dataset(dataset, seed=0, num_batches=SHARE_BATCHES, overrides=())
    else:
        workload = TerabyteWorkload()
        inputs = workload.inputs(workload.config("dlrm", "torchrec"), ranks)
        batches = workload.batches(ranks)
    training = Training(inputs, cycle(batches))
    keepers = {"dense": training.keeper, LIMIT: ByOthers()}
    training.timed_steps(WARM_UP_STEPS)
    rounds: list[dict[str, float]] = []
    order, shuffled, began = sorted(keepers), Random(0), perf_counter()
    goes_on = True
    while goes_on:
        shuffled.shuffle(order)
        rounds.append({})
        for name in order:
            training.keeper = keepers[name]
            training.timed_steps(1)  # it finds in the caches what the other one left there
            rounds[-1][name] = _timed(training, SHARE_STEPS) / SHARE_STEPS
        goes_on = not of_rank_0(is_known(rounds, "dense", LIMIT, effort, perf_counter() - began))
    num_values = sum(each.numel() for each in dense_parameters(training.model))
    del training
    gc.collect()  # its tables refer to each other
    return {"rounds": rounds, "num_values": num_values}


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """What all trainings share."""

    dataset: str
    """Prepared data; its last day is for testing."""
    steps: int
    evaluations: int
    """Evenly over the steps; the last one is at the end."""
    test_batches: int
    """Of all ranks together, the first ones of the test day."""

    def train(self, name: str, seed: int) -> dict[str, Any]:
        """One training from its first step to its last; all ranks call it together.

        Args:
            name: of the contender.
            seed: of the initial weights and of the order of samples.

        Returns:
            `curve`: `samples`, `seconds` of training so far, `auc` and `log_loss` on the test batches; and
            `link_bytes`, that left the busiest node in a step, embeddings included. Of ours also what they
            say of their exchanges since the beginning; of `auto`, its `decisions`, as `Watched` says.
        """
        inputs, batches, tests = _samples(self, seed)
        training = Training(inputs, iter(batches), keep=keep_as(CONTENDERS[name]))
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
        told = _told(training.keeper)
        del training
        gc.collect()
        return {"curve": curve, "link_bytes": max(every), **told}


def _told(keeper: Keeper) -> dict[str, Any]:
    """What ours says of its exchanges since the beginning."""
    told: dict[str, Any] = {}
    if isinstance(keeper, Watched):
        told = {"decisions": keeper.decisions}
        keeper = keeper.replicas
    figures = keeper.take_figures() if isinstance(keeper, AllReduceSync | SelectiveSync) else None
    if figures is not None:
        told |= {"collective": figures.name, "kept_share": figures.kept_share}
        told |= {"formula_bytes": figures.sent_bytes}
    return told


def _timed(training: Training, steps: int) -> float:
    """Seconds of steps of all ranks, until parameters are equal again, in so far as they will be."""
    dist.barrier()
    began = perf_counter()
    training.timed_steps(steps)
    training.keeper.join()
    dist.barrier()
    return perf_counter() - began


@lru_cache(maxsize=1)
def _samples(trainings: Trainings, seed: int) -> tuple[Inputs, Sequence[Batch], Sequence[Batch]]:
    """Of a seed: all batches to train on and to test with, read before any clock runs."""
    top = f"model.top_mlp={json.dumps(TOP_MLP)}"
    inputs, batches = _of_dataset(trainings.dataset, seed, trainings.steps, [top])
    _, tests = _of_dataset(trainings.dataset, seed, trainings.test_batches, [top], is_test=True)
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
