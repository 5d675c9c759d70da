"""Settings, tables and batches of `experiments.throughput`, shared by its launcher and its workers."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from time import perf_counter
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.batch import Batch
from data.criteo import CATEGORY_NAMES, DENSE_NAMES
from data.dataset import DatasetManifest, Feature
from data.loader import DataLoader, LoaderConfig
from data.synthetic.popularity import Popularity
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks
from dlrm.training.data import Inputs

CORES: Final = 2
CPU: Final = torch.device("cpu")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A trainer, its precision and its number of processes."""

    trainer: str
    """`ours` or `torchrec`."""
    precision: str
    """`fp32`, or `bf16`: mixed precision."""
    processes: int
    """Workers on this machine, which share the cores evenly as threads."""
    pipelined: bool = False
    """Whether TorchRec trains under `TrainPipelineSparseDist`."""
    keeps_memory: bool = False
    """Whether TorchRec gets the memory settings of this trainer (`dlrm.launch.malloc`)."""

    @property
    def threads(self) -> int:
        """Threads of each worker."""
        return CORES // self.processes

    @property
    def name(self) -> str:
        """Short unique name, part of the stored rows."""
        extras = [" pipelined"] * self.pipelined + [" keeps memory"] * self.keeps_memory
        return f"{self.trainer} {self.precision} {self.processes}x{self.threads}{''.join(extras)}"


OURS: Final = tuple(
    Setting(trainer="ours", precision=precision, processes=processes)
    for precision in ("bf16", "fp32")
    for processes in (1, 2)
)
TORCHREC: Final = tuple(
    Setting(trainer="torchrec", precision=precision, processes=processes, pipelined=pipelined)
    for precision in ("bf16", "fp32")
    for processes in (1, 2)
    for pipelined in (False, True)
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tables, batches and number of steps; `recipe` decides the network and the optimizers."""

    recipe: str = "terabyte"
    """Of `dlrm/recipes`."""
    rows: int = 100_000
    """Rows of each table."""
    num_tables: int = len(CATEGORY_NAMES)
    """Tables, each with a feature of its own."""
    ids_per_sample: int | None = None
    """Ids of a sample, spread evenly over the features, the first ones first; None: one a feature."""
    global_batch_size: int = 2048
    """Samples in a step, over all processes."""
    warm_up_steps: int = 15
    """Steps before the clock starts."""
    steps: int = 40
    """Steps that are timed."""
    num_batches: int = 8
    """Different batches, used in turn."""
    seed: int = 1
    """Decides the batches."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features of the data set, each with a table of its own."""
        return tuple(Feature(name=f"cat_{place}", rows=self.rows) for place in range(self.num_tables))

    @property
    def bag_sizes(self) -> tuple[int, ...]:
        """Ids of a sample by feature."""
        ids = self.num_tables if self.ids_per_sample is None else self.ids_per_sample
        return tuple((ids + place) // self.num_tables for place in reversed(range(self.num_tables)))

    def batches(self, rank: int, world_size: int) -> list[Batch]:
        """This rank's part of each global batch, with int64 ids skewed like Criteo's."""
        size = self.global_batch_size // world_size
        mine = slice(rank * size, (rank + 1) * size)
        popularity = Popularity(self.rows)
        made = []
        for number in range(self.num_batches):
            rng = np.random.default_rng([self.seed, number])
            ids = popularity.ids(rng.random((sum(self.bag_sizes), self.global_batch_size)))
            made.append(part_of_batch(ids, rng, mine, self.bag_sizes))
        return made


def part_of_batch(
    ids: Ids, rng: np.random.Generator, mine: slice, bag_sizes: Sequence[int] | None = None
) -> Batch:
    """A rank's part of a global batch of ids (see `bags`), with random dense values and labels."""
    size: int = ids.shape[1]
    dense = rng.random((size, len(DENSE_NAMES)), dtype=np.float32)[mine]
    labels = rng.integers(2, size=size)[mine].astype(np.float32)
    sparse = one_hot(ids[:, mine]) if bag_sizes is None else bags(ids[:, mine], bag_sizes)
    return Batch(torch.from_numpy(dense), sparse, torch.from_numpy(labels), num_valid=len(labels))


def inputs_of(
    config: Config,
    recipe: str,
    ranks: Ranks,
    features: tuple[Feature, ...],
    loader: object,
    test_loader: object | None = None,
    device: torch.device = CPU,
) -> Inputs:
    """Inputs of a training without a data set; loaders have what is used of a `DataLoader`."""
    return Inputs(
        config=config,
        recipe=recipe,
        ranks=ranks,
        device=device,
        manifest=DatasetManifest(features=features, parts=()),
        loader=cast("DataLoader", loader),
        test_loader=cast("DataLoader", test_loader or loader),
        source=None,
        ids={},
    )


def one_hot(ids: Ids) -> KeyedJaggedTensor:
    """Pack ids `[F, B]`, one per feature and sample; see `bags`."""
    return bags(ids, [1] * len(ids))


def bags(ids: Ids, sizes: Sequence[int]) -> KeyedJaggedTensor:
    """Pack ids of features `cat_0`, `cat_1`, ..., with the caches that TorchRec would compute itself.

    Args:
        ids: int64 `[sum(sizes), B]`, by feature.
        sizes: ids of a sample, by feature.
    """
    size, names = ids.shape[1], [f"cat_{place}" for place in range(len(sizes))]
    lengths = torch.tensor(sizes).repeat_interleave(size)
    ends = np.cumsum([0, *sizes])
    parts = [ids[begin:end].T.reshape(-1) for begin, end in pairwise(ends)]
    return KeyedJaggedTensor(
        keys=names,
        values=torch.from_numpy(np.concatenate(parts)),
        lengths=lengths,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        stride=size,
        length_per_key=[size * each for each in sizes],
        offset_per_key=[size * int(end) for end in ends],
        index_per_key={name: place for place, name in enumerate(names)},
    )


class TimedBatches:
    """Yields batches in turn and measures the time until the consumer asks for the next one.

    In a steady state that is the time of a step, even if the consumer reads ahead. The class replaces
    `data.loader.DataLoader` in the training loop and counts as one epoch there.

    Args:
        workload: makes the batches.
        steps: number of batches.
        rank: of this process.
        world_size: number of processes.
        after_step: called whenever the consumer asks for the next batch.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        steps: int,
        rank: int,
        world_size: int,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = LoaderConfig(batch_size=workload.global_batch_size // world_size)
        self.manifest = DatasetManifest(features=workload.features, parts=())
        self.epoch = 0
        self.took_s: list[float] = []
        self._world_size = world_size
        self._batches = workload.batches(rank, world_size)
        self._steps = steps
        self._after_step = after_step
        self._unseen: Iterator[Batch] = iter(())
        self._ahead: deque[Batch] = deque()

    @property
    def step_samples(self) -> int:
        """Samples of all ranks in one step."""
        return self.config.batch_size * self._world_size

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of one epoch."""
        self._unseen = self._epoch()
        while self.upcoming(1):
            start_s = perf_counter()
            yield self._ahead.popleft()
            self.took_s.append(perf_counter() - start_s)
            self._after_step()
        self.epoch += 1

    def upcoming(self, count: int) -> list[Batch]:
        """See `data.loader.DataLoader.upcoming`."""
        self._ahead += islice(self._unseen, max(0, count - len(self._ahead)))
        return list(islice(self._ahead, count))

    def _epoch(self) -> Iterator[Batch]:
        return islice(cycle(self._batches), self._steps)
