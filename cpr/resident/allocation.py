"""Allocation of tables in resident memory while TorchRec builds a model.

TorchRec's fused kernels make an FBGEMM module, whose tensors have no views yet, and pass it to the optimizer,
which makes the views. In between, its host tensors move into the segment: into new memory, or into the memory
of the previous worker if that held the same tables in the same order. Adopted memory is not initialised
again. Tables on a GPU, and those that an ordinary optimizer updates, are left alone.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from cpr.checkpoint.format.tree_file import dtype_name
from cpr.errors import ResidentMemoryError
from cpr.resident.layout import KernelMemory
from cpr.resident.segment import Segment
from cpr.shards.shard import TableShard

KERNELS: Final = "torchrec.distributed.batched_embedding_kernel"
COLLECTIONS: Final = "torchrec.distributed.embedding"
FBGEMM: Final = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
ALLOCATOR: Final = (FBGEMM, "SplitTableBatchedEmbeddingBagsCodegen", "_apply_split")
OPTIMIZER: Final = (KERNELS, "EmbeddingFusedOptimizer", "__init__")
INITIALISERS: Final = (
    (KERNELS, "BaseBatchedEmbedding", "init_parameters"),
    (KERNELS, "BaseBatchedEmbeddingBag", "init_parameters"),
)
RESETS: Final = {
    "embedding": (COLLECTIONS, "ShardedEmbeddingCollection", "reset_parameters"),
    "embedding_bag": (f"{COLLECTIONS}bag", "ShardedEmbeddingBagCollection", "reset_parameters"),
}
"""Methods that initialise tables a second time, by the prefix of their collection's attributes."""
COLUMNS: Final = ("cpr.shards.row_columns", "RowColumns", "allocate")
"""Method that allocates columns which were added to a table."""


@dataclass(eq=False)
class Allocation:
    """Result of `allocate_tables`; final when the block is left."""

    adopted: bool = False
    """Whether all tables live, unchanged, in the memory of the previous worker."""
    reason: str = ""
    """Why not."""
    num_bytes: int = 0
    """Bytes of the tables with their optimizer state."""


@contextmanager
def allocate_tables(segment: Segment, adopt: bool) -> Iterator[Allocation]:
    """Allocate the tables of the model that is built in the block in `segment`.

    If the tables, or their order, differ from those that the segment holds, all get new memory, initialised
    as TorchRec does. The old memory then stays next to the new one, for `held_shards`, until `seal`.

    Args:
        segment: owned by this process.
        adopt: take over the tables that the segment holds, if they are the same.

    Raises:
        NotEnoughMemoryError: there is no room.
        DamagedMemoryError: the segment differs from what was sealed.
        ResidentMemoryError: this TorchRec or FBGEMM lacks something that is needed.
    """
    building = _Building(segment, adopt)
    with ExitStack() as patches:
        for (module, owner, name), wrap in building.wrappers():
            kind = _find(module, owner, name)
            patches.enter_context(patch.object(kind, name, wrap(getattr(kind, name))))
        yield building.result
    building.finish()


def _find(module: str, owner: str, name: str) -> Any:
    kind = getattr(import_module(module), owner, None)
    if not callable(getattr(kind, name, None)):
        raise ResidentMemoryError(
            f"there is no {module}.{owner}.{name} here, so tables cannot live in resident memory. "
            "What to do: use torchrec and fbgemm-gpu 1.6 to 1.8"
        )
    return kind


@dataclass(eq=False)
class _Building:
    """What was built so far, and which initialisations were skipped because memory was adopted."""

    segment: Segment
    adopt: bool
    result: Allocation = field(default_factory=Allocation)
    _before: list[KernelMemory] = field(default_factory=list)
    """Kernels that the segment holds and that were not built yet."""
    _modules: list[Any] = field(default_factory=list)
    """FBGEMM modules whose tensors have moved."""
    _storages: set[int] = field(default_factory=set)
    """Addresses of adopted memory."""
    _skipped: list[Callable[[], Any]] = field(default_factory=list)
    """Skipped initialisations, to be made up for if the memory turns out to be of other tables."""

    def __post_init__(self) -> None:
        self._build = secrets.token_hex(4)  # names of files: never those of an earlier build
        layout = self.segment.layout if self.adopt else None
        self.segment.begin_build()
        self.result.adopted = layout is not None
        if layout is None:
            self.result.reason = "the segment was not sealed" if self.adopt else "the tables are to be new"
        else:
            self._before = list(layout.kernels)

    def wrappers(self) -> Iterator[tuple[tuple[str, str, str], Callable[[Any], Any]]]:
        """Methods to replace while a model is built, and their wrappers."""
        yield ALLOCATOR, _allocating
        yield OPTIMIZER, self._moving
        yield COLUMNS, self._adding
        for method in INITIALISERS:
            yield method, self._initialising
        for prefix, method in RESETS.items():
            yield method, partial(self._resetting, prefix=prefix)

    def finish(self) -> None:
        """Check the complete model."""
        if self.result.adopted and self._before:
            self._refuse(f"the model lacks {len(self._before)} of the kernels that the segment holds")

    def _moving(self, original: Any) -> Any:
        @wraps(original)
        def make_optimizer(optimizer: Any, config: Any, emb_module: Any, *args: Any, **kwargs: Any) -> None:
            if not any(module is emb_module for module in self._modules):  # called once for each table
                self._modules.append(emb_module)
                self._move(config, emb_module)
            original(optimizer, config, emb_module, *args, **kwargs)

        return make_optimizer

    def _initialising(self, original: Any) -> Any:
        @wraps(original)
        def init_parameters(kernel: Any) -> None:
            module = kernel.emb_module
            if getattr(module, "weights_host", None) is not None and self._is_adopted(module.weights_host):
                self._skipped.append(partial(original, kernel))
            else:
                original(kernel)

        return init_parameters

    def _resetting(self, original: Any, prefix: str) -> Any:
        @wraps(original)
        def reset_parameters(collection: Any) -> None:
            tables = getattr(collection, f"{prefix}s")
            with ExitStack() as patches:
                for config in getattr(collection, f"_{prefix}_configs"):
                    weight = tables[config.name].weight
                    if self._is_adopted(weight):
                        self._skipped.append(partial(config.init_fn, weight))
                        patches.enter_context(patch.object(config, "init_fn", _leave))
                original(collection)  # always: it may take part in a collective

        return reset_parameters

    def _is_adopted(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def _move(self, config: Any, emb_module: Any) -> None:
        tensors = {
            name: tensor
            for name, tensor in [*emb_module._parameters.items(), *emb_module._buffers.items()]
            if name.endswith("_host") and tensor.numel() and tensor.device.type == "cpu"
        }
        files = self._files(_signature(config, emb_module, tensors), list(tensors), _names(config))
        for name, tensor in tensors.items():
            region = self.segment.region(files[name], tensor.dtype, tensor.numel()).view(tensor.shape)
            _replace(name, tensor, region)
            self.result.num_bytes += region.nbytes
            if self.result.adopted:
                self._storages.add(region.untyped_storage().data_ptr())

    def _adding(self, original: Any) -> Any:
        @wraps(original)
        def allocate(columns: Any, table: TableShard, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
            num_rows = table.weights.shape[0]
            if table.weights.device.type != "cpu" or num_rows == 0:
                made: dict[str, Tensor] = original(columns, table, dtypes)
                return made
            names = {name: str(dtype) for name, dtype in dtypes.items()}
            signature = json.dumps([table.table_fqn, table.row_offset, table.col_offset, num_rows, names])
            files = self._files(signature, list(names), f"the columns of {table.table_fqn}")
            regions = {
                name: self.segment.region(files[name], dtype, num_rows) for name, dtype in dtypes.items()
            }
            self.result.num_bytes += sum(region.nbytes for region in regions.values())
            return regions

        return allocate

    def _files(self, signature: str, names: Sequence[str], what: str) -> dict[str, str]:
        """File names for the next memory: those of the previous worker, or new ones."""
        if self.result.adopted and (not self._before or self._before[0].signature != signature):
            self._refuse(f"the segment holds other tables than {what}, or lays them out differently")
        if self.result.adopted:
            files = self._before.pop(0).files
        else:
            files = {name: f"{self._build}-{len(self.segment.kernels)}-{name}" for name in names}
        self.segment.kernels.append(KernelMemory(signature=signature, files=files))
        return files

    def _refuse(self, reason: str) -> None:
        """Give up adoption: use adopted memory as new, and keep copies of its content under the old names."""
        self.result.adopted, self.result.reason, self._before = False, reason, []
        self._storages.clear()
        for place, kernel in enumerate(self.segment.kernels):
            files = {name: f"{self._build}-{place}-{name}" for name in kernel.files}
            for name, file in kernel.files.items():
                self.segment.set_aside(file, files[name]).zero_()
            self.segment.kernels[place] = KernelMemory(signature=kernel.signature, files=files)
        for initialise in self._skipped:
            initialise()
        self._skipped.clear()


def _signature(config: Any, emb_module: Any, tensors: dict[str, Tensor]) -> str:
    """Description of an FBGEMM module; equal if the memory has the same meaning."""
    tables = []
    for table in config.embedding_tables:
        metadata = table.local_metadata  # None: the whole table
        place = [*metadata.shard_offsets, *metadata.shard_sizes] if metadata else None
        tables.append([table.name, table.num_embeddings, table.embedding_dim, place])
    memory = {name: [tensor.numel(), dtype_name(tensor)] for name, tensor in sorted(tensors.items())}
    optimizer = str(getattr(emb_module, "optimizer", None))
    return json.dumps([type(emb_module).__name__, optimizer, tables, memory])


def _names(config: Any) -> str:
    return ", ".join(table.name for table in config.embedding_tables)


def _replace(name: str, tensor: Tensor, region: Tensor) -> None:
    """Move a tensor to `region`; no view of its old memory may be left."""
    before = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    tensor.data = region
    if not before.expired():  # type: ignore[no-untyped-call]
        raise ResidentMemoryError(
            f"something in this FBGEMM views {name} before TorchRec does, so it cannot be put into resident "
            "memory. What to do: use fbgemm-gpu 1.6 to 1.8"
        )


def _allocating(original: Any) -> Any:
    @wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> None:
        with _LazyZeros():
            original(*args, **kwargs)

    return allocate


class _LazyZeros(TorchFunctionMode):
    """Makes `torch.zeros` return pages that the operating system provides only when they are used.

    FBGEMM's own tensors are replaced at once, and must cost neither memory nor time.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_plain = kwargs.keys() == {"device", "dtype"} and len(args) == 1 and isinstance(args[0], int)
        if func is torch.zeros and is_plain and torch.device(kwargs["device"]).type == "cpu":
            pages = np.zeros(args[0] * kwargs["dtype"].itemsize, dtype=np.uint8)
            return torch.from_numpy(pages).view(kwargs["dtype"])
        return func(*args, **kwargs)


def _leave(weight: Tensor) -> None:
    """Initialise nothing."""
