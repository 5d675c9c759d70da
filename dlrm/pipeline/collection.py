"""Sharded collections of a model that work ahead of its forward pass.

`PipelinedCollection` takes over a model's calls of a collection. The ids of a batch may be sent long before,
and its pooled embeddings be looked up and sent before the batch before it is trained (`Correction` makes them
exact). When the model then calls the collection with this batch, it gets what was made ahead; called with
anything else, as in evaluation, the collection works as usual.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.types import Awaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards.row_columns import row_columns
from dlrm.pipeline.corrections import NOTHING, Columns, Correction
from dlrm.pipeline.predictions import predicted_change
from dlrm.sharding.host_lookup import HostLookup, Reads
from dlrm.sharding.splitting.sharded import ShardedHead

LateRows = Literal["corrected", "stale", "predicted"]


class SentIds:
    """Ids of a batch as they were when they were sent to other ranks."""

    def __init__(self, sparse: KeyedJaggedTensor) -> None:
        self._sparse, self._versions = sparse, _versions(sparse)
        # a GPU's would have to be waited for
        self._copies = [each.clone() for each in _tensors(sparse) if each.device.type == "cpu"]

    def are(self, sparse: KeyedJaggedTensor) -> bool:
        """Whether these are the ids that were sent, and nobody has written into them since.

        Raises:
            ValueError: the model has written into them, on the CPU, in a way that PyTorch does not count.
        """
        if sparse is not self._sparse or _versions(sparse) != self._versions:
            return False
        if not all(map(_is_same, _tensors(sparse), self._copies)):
            raise ValueError(
                "the model has changed ids of its batch through .data or .numpy(), after they were sent to "
                "the other ranks: let it change a copy, or choose train.pipeline=none"
            )
        return True


@dataclass
class Prefetched:
    """What was done ahead in a collection for a batch."""

    sent_ids: SentIds
    """Ids of the batch."""
    context: Any
    ids: Any
    """An awaitable of an awaitable of the ids, then an awaitable of them, then the ids."""
    waits: int = 2
    """How often `ids` must be awaited."""
    stream: torch.cuda.Stream | None = None
    """That the ids travel on; None on the CPU."""
    sent: dict[int, Any] = field(default_factory=dict)
    """Awaitables of embeddings that travel, by number of the sharding type in the collection."""
    reads: dict[int, Reads] = field(default_factory=dict)
    corrections: dict[int, Correction] = field(default_factory=dict)

    def forget_lookups(self) -> None:
        """Forget embeddings that were looked up, which will be looked up again; not the ids."""
        for each in (self.sent, self.reads, self.corrections):
            each.clear()

    def advance(self, waits: int = 0) -> Any:
        """Wait for the exchange of ids until it needs only so many waits more; starts its next part."""
        with torch.cuda.stream(self.stream):  # where waiting does not wait for the computation
            while self.waits > waits:
                self.ids, self.waits = self.ids.wait(), self.waits - 1
        return self.ids

    def take(self) -> Any:
        """The ids, for use on the current stream."""
        ids = self.advance()
        if self.stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self.stream)
            ids.record_stream(current)  # or the other stream's allocator might reuse their memory early
            self.context.record_stream(current)
        return ids


class PipelinedCollection:
    """One sharded collection; all ranks call all methods in the same order.

    Args:
        module: any of TorchRec's sharded modules; its `forward` is replaced.
        late_rows: embeddings that were looked up before the last update are `corrected`; or they are `stale`,
            or of `predicted` rows.
    """

    def __init__(self, module: ShardedModule[Any, Any, Any, Any], late_rows: LateRows) -> None:
        self._module, self._forward, self._late_rows = module, module.forward, late_rows
        self._lookups: dict[int, HostLookup | None] = {}
        self._columns: dict[int, Columns] = {}
        if isinstance(module, ShardedEmbeddingBagCollection):
            for number, columns in enumerate(_columns_of_early(module)):
                if columns is not None:
                    self._lookups[number], self._columns[number] = _host_lookup(module, number), columns
            for exchange in module._output_dists:
                exchange.forward = partial(_exchange, exchange.forward)
        for lookup in self._lookups.values():
            if lookup is not None and late_rows == "predicted":
                lookup.keeps_change = True
        self._row_versions: list[int] = []
        self._starting = False
        self._ready: Prefetched | None = None
        self.trains_others = False
        """Whether the model has called the collection, to train it, with something else than was given."""
        self._asked: Any = None
        module.register_forward_pre_hook(self._note, prepend=True)  # before hooks that replace the ids
        module.forward = self._called

    @property
    def is_early(self) -> bool:
        """Whether some embeddings can be looked up and sent early."""
        return bool(self._lookups)

    def start(self, sparse: KeyedJaggedTensor, stream: torch.cuda.Stream | None = None) -> Prefetched:
        """Start to send the ids of a batch, which are ready on `stream`; None on the CPU."""
        self._starting = True
        try:
            with torch.cuda.stream(stream):
                prefetched: Prefetched = self._module(sparse)  # so that its hooks see the batch
        finally:
            self._starting = False
        prefetched.stream = stream
        return prefetched

    def look_up(self, prefetched: Prefetched, trained: Prefetched | None = None) -> None:
        """Look up and send embeddings of a batch, before rows that the batch `trained` reads change.

        None trains meanwhile: no rows will change.
        """
        module: Any = self._module
        ids = prefetched.take()
        for number, lookup in self._lookups.items():
            context = prefetched.context.sharding_contexts[number]
            local = module._lookups[number](ids[number])
            reads = NOTHING if lookup is None or lookup.newest is None else lookup.newest
            prefetched.reads[number] = reads
            if trained is not None and lookup is not None and self._late_rows == "predicted":
                change = predicted_change(lookup, trained.reads[number], reads)
                local = local if change is None else local + change
            awaitable = module._output_dists[number](local, context)
            if trained is not None and self._late_rows == "corrected":
                sizes, columns = context.batch_size_per_rank, self._columns[number]
                before = trained.reads[number]
                correction = Correction(lookup, before, reads, columns, sizes, local.dtype)
                prefetched.corrections[number] = correction
                awaitable = _Corrected(awaitable, correction)
            prefetched.sent[number] = awaitable

    def note_rows(self) -> None:
        """Note that all changes of rows up to now are known."""
        self._row_versions = self._versions_of_rows()

    def check_rows(self) -> None:
        """Check that nothing but updates in the backward pass has changed rows since they were noted.

        Raises:
            ValueError: something has, which corrections do not know of.
        """
        if self._late_rows == "corrected" and self._versions_of_rows() != self._row_versions:
            raise ValueError(
                "rows of tables changed outside of the backward pass, as if the model itself writes into "
                "them; train.pipeline=prefetch has looked up rows before that: choose train.pipeline=ids"
            )

    def _versions_of_rows(self) -> list[int]:
        return [lookup.weights._version for lookup in self._lookups.values() if lookup is not None]

    def look_up_parts(self, prefetched: Prefetched, parts: Sequence[KeyedJaggedTensor]) -> list[Prefetched]:
        """Look up the embeddings of a whole batch, and send those of its parts one after the other.

        The rows are updated once, when all parts' gradients are there.
        """
        module: Any = self._module
        ids, contexts = prefetched.take(), prefetched.context.sharding_contexts
        sizes = [part.stride() for part in parts]
        found = [
            Prefetched(SentIds(part), replace(prefetched.context, sharding_contexts=[]), ids, waits=0)
            for part in parts
        ]
        for number, (lookup, context) in enumerate(zip(module._lookups, contexts, strict=True)):
            of_ranks = sizes * max(
                1, len(context.batch_size_per_rank)
            )  # of replicated tables: this rank alone
            local = lookup(ids[number])
            pieces = local.reshape(sum(of_ranks), local.numel() // sum(of_ranks)).split(of_ranks)
            for place, each in enumerate(found):
                of_part = replace(context, batch_size_per_rank=of_ranks[place :: len(parts)])
                each.context.sharding_contexts.append(of_part)
                embeddings = torch.cat(pieces[place :: len(parts)])
                each.sent[number] = module._output_dists[number](embeddings, of_part)
        return found

    def give(self, prefetched: Prefetched | None) -> None:
        """Let the model's next call with a batch return what was made ahead; None: work as usual."""
        self._ready, self.trains_others = prefetched, self.trains_others and prefetched is None

    def _note(self, module: nn.Module, arguments: Sequence[Any]) -> None:
        self._asked = arguments[0]

    def _called(self, *arguments: Any) -> Any:
        if self._starting:
            context = self._module.create_context()
            ids = self._module.input_dist(context, *arguments)
            return Prefetched(SentIds(self._asked), context, ids)
        prefetched, self._ready = self._ready, None
        if prefetched is None or not prefetched.sent_ids.are(self._asked):
            self.trains_others |= self._module.training and torch.is_grad_enabled()
            return self._forward(*arguments)
        ids = prefetched.take()
        if isinstance(self._module, ShardedHead):
            prefetched.context.dense = arguments[1:]
        if not prefetched.sent:
            return self._module.compute_and_output_dist(prefetched.context, ids)
        module: Any = self._module
        outputs = [
            prefetched.sent[number] if number in prefetched.sent else lookup(ids[number])
            for number, lookup in enumerate(module._lookups)
        ]
        return module.output_dist(prefetched.context, outputs)


class _Corrected(Awaitable[Tensor]):  # type: ignore[misc]
    """The output of an exchange, corrected."""

    def __init__(self, output: Awaitable[Tensor], correction: Correction) -> None:
        super().__init__()
        self._output, self._correction = output, correction

    def _wait_impl(self) -> Tensor:
        output: Tensor = self._output.wait()
        self._correction.apply(output)
        return output


def _exchange(forward: Callable[..., Any], local: Any, *context: Any) -> Any:
    """Exchange embeddings, unless they were sent ahead."""
    return forward(local, *context) if isinstance(local, Tensor) else local


def _host_lookup(module: Any, number: int) -> HostLookup | None:
    """The lookup of this rank's tables of a sharding type; None: it has none."""
    kernels = module._lookups[number]._emb_modules
    return kernels[0].emb_module.forward if kernels else None


def _columns_of_early(module: Any) -> list[Columns | None]:
    """For each sharding type of a collection the columns of its exchange; None: it cannot be early.

    All ranks must agree. Rows that a lookup itself changes (ids that get a row) cannot be read early, and of
    FBGEMM's own lookup a few bags cannot be summed again.
    """
    mine = [_widths(module, number) for number in range(len(module._lookups))]
    every: list[list[tuple[int, int] | None]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: list[Columns | None] = []
    for widths in zip(*every, strict=True):
        dims = {each[0] for each in widths if each is not None and each[1]}
        if None in widths or len(dims) != 1:
            found.append(None)
        else:
            found.append(Columns(dim=dims.pop(), of_ranks=tuple(each[1] for each in widths)))
    return found


def _widths(module: Any, number: int) -> tuple[int, int] | None:
    """Width and number of embeddings of this rank's tables of a type; None: they cannot be early."""
    exchange, lookup = module._output_dists[number], module._lookups[number]
    if type(exchange) is not TwPooledEmbeddingDist or exchange._callbacks or exchange._codecs is not None:
        return None
    kernels = lookup._emb_modules
    if not kernels:
        return 0, 0
    tbe = kernels[0].emb_module
    if len(kernels) > 1 or not isinstance(tbe.forward, HostLookup) or row_columns(tbe):
        return None
    bags = tbe.forward.bags
    return bags.dim, bags.num_features


def called_with_batch(model: nn.Module, call: Callable[[], Any], sparse: KeyedJaggedTensor) -> list[Any]:
    """The sharded modules that `call`, a forward pass of a model, calls once and with `sparse` as it is."""
    calls: dict[nn.Module, list[bool]] = {}
    versions = _versions(sparse)

    def note(module: nn.Module, arguments: Sequence[Any]) -> None:
        is_batch = arguments[0] is sparse and _versions(sparse) == versions
        calls.setdefault(module, []).append(is_batch)

    hooks = [
        each.register_forward_pre_hook(note, prepend=True)
        for each in model.modules()
        if isinstance(each, ShardedModule)
    ]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return [module for module, were in calls.items() if were == [True]]


def _versions(sparse: KeyedJaggedTensor) -> list[int]:
    """How often the tensors of a batch's ids were written into."""
    return [each._version for each in _tensors(sparse)]


def _is_same(now: Tensor, then: Tensor) -> bool:
    return torch.equal(now, then) or bool(((now == then) | now.isnan()).all())  # weights may be NaN


def _tensors(sparse: KeyedJaggedTensor) -> list[Tensor]:
    tensors = (sparse.values(), sparse.lengths(), sparse.weights_or_none())
    return [each for each in tensors if each is not None]
