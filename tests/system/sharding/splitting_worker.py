"""Workers of `test_splitting` that train a split head and compare with one process."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards, table_groups
from data.dataset import Feature
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.dense_sync import AllReduceSync
from dlrm.models.dcn import CrossHead
from dlrm.models.deepfm import DeepFMHead
from dlrm.models.dlrm import DotHead
from dlrm.models.fm import FMHead, LinearHead
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.rows import RowSplitSharder
from dlrm.sharding.splitting.sharded import HeadSharder, ShardedHead
from dlrm.sharding.tables import initialize_tables

FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((50, 7, 300, 24, 11, 2)))
DIM = 16
DEEP = (10, 6, 1)
CROSS_LAYERS, CROSS_RANK = 2, 6
FIELDS = [feature.name for feature in FEATURES]
HEADS = ("linear", "fm", "dot", "deepfm", "cross")
NUM_DENSE = 3
STEPS = 8
RATE = 0.1
TOLERANCE = 1e-6
"""Of 1, or of a tensor's largest magnitude where that is more. fp32 has 6e-8 of it, and ranks add up in
another order than one process, so that even after 20 steps numbers differ by only a few of these: parameters
and their state by up to 2.4e-7 where this was written, gradients by 4.2e-7, logits by 9.5e-7 (of 2.5)."""
SCALE = 0.1
"""Of the rows at first: sums of bags and products of them stay in the scale of 1."""
EPS = 0.01
"""Of Adagrad, which divides a gradient by its size plus this: rounding errors of gradients about as small
become up to RATE / EPS times as large in a step. With PyTorch's 1e-10, rows with hardly any gradient differ
by up to 5e-6 after 20 steps."""


@dataclass(frozen=True)
class Case:
    """A head to split, and how the ranks' samples are."""

    head: str
    optimizer: str = "sgd"
    multi_hot: bool = False
    batch_sizes: tuple[int, ...] = ()
    """Samples of each rank; empty: 8 each."""
    layout: str = ""
    """`rows`: all tables row-wise; `fewer`: the last rank owns nothing; empty: as the head is split."""
    host_lookups: bool = False
    """Whether PyTorch's kernels look rows up in place of FBGEMM's."""
    ranks_per_node: int = 1
    """More than one: partial results are summed inside nodes first."""


def make_head(name: str) -> Head:
    """On the meta device as for its tables."""
    kinds: dict[str, Any] = {
        "linear": lambda: LinearHead(FEATURES),
        "fm": lambda: FMHead(FEATURES, DIM, torch.float32),
        "dot": lambda: DotHead(FEATURES, DIM, torch.float32),
        "deepfm": lambda: DeepFMHead(FEATURES, DIM, DIM, DEEP, torch.float32),
        "cross": lambda: CrossHead(FEATURES, DIM, DEEP, CROSS_LAYERS, CROSS_RANK, torch.float32),
    }
    head: Head = kinds[name]()
    return head


def as_split(kind: type, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a model, or a state of each, as they are called and shaped where its head is split.

    Args:
        kind: of the head.
        named: by name where it is whole.
    """
    if kind is DeepFMHead:
        first = named["head.deep.hidden.0.weight"]
        rest = {"head.deep.hidden.0.weight": first[:, :DIM]}
        return {**named, **rest, **_tables("first", "first_", first[:, DIM:].t(), FIELDS)}
    return {**named, **dict(_of_cross(named))} if kind is CrossHead else named


def _of_cross(named: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    fields = ["dense", *FIELDS]
    biases = []
    for layer in range(CROSS_LAYERS):
        for way, weight in (
            ("down", named[f"head.cross.down.{layer}.weight"].t()),
            ("up", named[f"head.cross.up.{layer}.weight"]),
        ):
            path = f"cross_tables.{way}.{layer}"
            yield from _tables(path, f"cross_{way}_{layer}_", weight, fields).items()
        biases.append(named[f"head.cross.up.{layer}.bias"])
    yield from _tables("cross_tables.bias", "cross_bias_", torch.stack(biases, dim=1), fields).items()
    yield from _tables("first", "first_", named["head.top.hidden.0.weight"].t(), fields).items()


def _tables(path: str, prefix: str, weight: Tensor, fields: list[str]) -> dict[str, Tensor]:
    """Operator tables, filled up to a multiple of four columns."""
    rows = pad(weight, (0, -weight.shape[1] % 4)).split(DIM)
    return {
        f"head.{path}.tables.embedding_bags.{prefix}{field}.weight": of_field
        for field, of_field in zip(fields, rows, strict=True)
    }


class Model(nn.Module):
    """A head between two small layers."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.bottom = nn.Linear(NUM_DENSE, DIM)
        self.head: Any = make_head(head)
        width = self.head.out_features if head == "dot" else 1
        self.top = nn.Linear(width, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        interacted = self.head(sparse, self.bottom(dense))
        out: Tensor = self.top(interacted if interacted.dim() == 2 else interacted.unsqueeze(1))
        return out.squeeze(1)


def make_model(head: str) -> tuple[Model, dict[str, Tensor]]:
    """Equal on all ranks, its tables on the meta device, and their initial values."""
    torch.manual_seed(5)
    model = Model(head)
    weights = {
        table.name: torch.randn(table.num_embeddings, table.embedding_dim) * SCALE
        for table in model.head.tables.embedding_bag_configs()
    }
    return model, weights


def alone(head: str) -> Model:
    """The model in one process."""
    model, weights = make_model(head)
    model.head.tables.to_empty(device=torch.device("cpu"))
    for name, table in model.head.tables.embedding_bags.items():
        table.weight.data.copy_(weights[name])
    return model


def plan_of(model: Model, layout: str, sharder: EmbeddingBagCollectionSharder) -> ShardingPlan:
    """Tables in turn, uneven columns, or rows; of the head if it can be split so, or else of its tables."""
    world_size = dist.get_world_size()
    owners = max(world_size - (layout == "fewer"), 1)
    columns = [4] * (owners - 1)
    columns.append(DIM - sum(columns))
    kind = "rows" if layout == "rows" else model.head.split_by
    kinds: dict[str, Any] = {
        "tables": lambda place: table_wise(rank=place % owners, compute_kernel="fused"),
        "columns": lambda _: column_wise(
            ranks=list(range(owners)), size_per_rank=columns, compute_kernel="fused"
        ),
        "rows": lambda _: row_wise(compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        model.head.tables,
        {feature.name: kinds[kind](place) for place, feature in enumerate(FEATURES)},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    is_split = kind in (model.head.split_by, *model.head.also_by)
    return ShardingPlan({"head" if is_split else "head.tables": plan})


def make_batch(step: int, size: int, multi_hot: bool) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Dense, labels, and for each feature ids and lengths, of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    bags = []
    for feature in FEATURES:
        lengths = torch.ones(size, dtype=torch.int64)
        if multi_hot:
            lengths = torch.randint(0, 4, (size,), generator=generator)
        bags.append((torch.randint(0, feature.rows, (int(lengths.sum()),), generator=generator), lengths))
    labels = torch.randint(0, 2, (size,), generator=generator).to(torch.float32)
    return torch.randn(size, NUM_DENSE, generator=generator), labels, bags


def slice_of(bags: list[tuple[Tensor, Tensor]], first: int, last: int) -> KeyedJaggedTensor:
    """The bags of some samples."""
    values = [ids[int(lengths[:first].sum()) : int(lengths[:last].sum())] for ids, lengths in bags]
    lengths = [lengths[first:last] for _, lengths in bags]
    return KeyedJaggedTensor(
        keys=[feature.name for feature in FEATURES], values=torch.cat(values), lengths=torch.cat(lengths)
    )


def make_sharded(case: Case) -> DistributedModelParallel:
    """The model split as the case says, its rows those of `make_model`."""
    model, weights = make_model(case.head)
    tables = RowSplitSharder(
        fused_params={
            "optimizer": TABLE_OPTIMIZERS[case.optimizer].fbgemm_type,
            "learning_rate": RATE,
            "eps": EPS,
        }
    )
    heads = HeadSharder(type(model.head), tables, operators=tables, ranks_per_node=case.ranks_per_node)
    sharded = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan_of(model, case.layout, tables),
        sharders=[heads, tables],
        init_data_parallel=False,
    )
    if case.host_lookups:
        groups = list(table_groups(sharded.module.head.tables))
        assert use_host_lookups([group.emb_module for group in groups], torch.float32) == len(groups)
    initialize_tables(sharded, seed=0)  # weights of operators among them; the rest is ours
    for shard in find_shards(sharded.module.head.tables):
        shard.weights.copy_(part(weights[shard.table_fqn.rpartition(".")[2]], shard))
    return sharded


def check(case: Case) -> None:
    """Split and alone, the same steps: logits, all gradients, all parameters and all state are equal."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = case.batch_sizes or (8,) * world_size
    sharded, reference = make_sharded(case), alone(case.head)
    make_optimizer = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[case.optimizer]
    options = {} if case.optimizer == "sgd" else {"eps": EPS}
    reference_optimizer = make_optimizer(reference.parameters(), lr=RATE, **options)
    dense_optimizer = make_optimizer(dense_parameters(sharded), lr=RATE, **options)
    replicas = AllReduceSync(dense_parameters(sharded), 1)
    comparison = Comparison(case, sharded, reference)
    first, last = sum(sizes[:rank]), sum(sizes[: rank + 1])
    own = slice(first, last)
    # every sample counts the same, however many a rank has
    weight = world_size / sum(sizes)
    for step in range(STEPS):
        dense, labels, bags = make_batch(step, sum(sizes), case.multi_hot)
        logits = reference(dense, slice_of(bags, 0, sum(sizes)))
        binary_cross_entropy_with_logits(logits, labels).backward()
        before = comparison.rows()
        found = sharded(dense[own], slice_of(bags, first, last))
        comparison.assert_same("logits", found, logits[own])
        (binary_cross_entropy_with_logits(found, labels[own], reduction="sum") * weight).backward()
        replicas.average(torch.zeros(1))
        comparison.check_gradients(before)
        for optimizer in (reference_optimizer, dense_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    comparison.check_parameters(reference_optimizer)


class Comparison:
    """A split model beside the same model in one process, whose tensors are called as the former's.

    Args:
        case: of the former.
        sharded: the former.
        reference: the latter.
    """

    def __init__(self, case: Case, sharded: DistributedModelParallel, reference: Model) -> None:
        self._case, self._sharded = case, sharded
        self._shards = list(find_shards(sharded))
        self._whole = dict(reference.named_parameters())
        split = sharded.module.head
        # by rows, heads with weights are not split themselves
        self._as_split = (
            partial(as_split, split.unsharded_module_type) if isinstance(split, ShardedHead) else dict
        )

    def rows(self) -> dict[str, Tensor]:
        """All rows of this rank."""
        return {shard.name: shard.weights.clone() for shard in self._shards}

    def check_gradients(self, before: dict[str, Tensor]) -> None:
        """Of dense parameters; and of rows, which SGD has moved by them from what they were before."""
        expected = self._as_split(
            {
                name: torch.zeros_like(each) if each.grad is None else each.grad
                for name, each in self._whole.items()
            }
        )
        for name, parameter in self._dense():
            if parameter.grad is not None:  # a layer that takes no part may have none
                self.assert_same(f"gradient of {name}", parameter.grad, expected[name])
        if self._case.optimizer == "sgd":
            for shard in self._shards:
                moved = (before[shard.name] - shard.weights) / RATE
                self.assert_same(
                    f"gradient of {shard.name}", moved, part(expected[f"{shard.table_fqn}.weight"], shard)
                )

    def check_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """All that there are, and the state of rows."""
        expected = self._as_split({name: each.detach() for name, each in self._whole.items()})
        for name, parameter in self._dense():
            self.assert_same(name, parameter, expected[name])
        for shard in self._shards:
            name = f"{shard.table_fqn}.weight"
            self.assert_same(name, shard.weights, part(expected[name], shard))
            for kind, state in shard.optimizer_state.items():
                states = {each: optimizer.state[parameter][kind] for each, parameter in self._whole.items()}
                self.assert_same(f"{kind} of {name}", state, part(self._as_split(states)[name], shard))

    def assert_same(self, what: str, found: Tensor, expected: Tensor) -> None:
        """To `TOLERANCE`."""
        if expected.numel():
            found, expected = found.detach(), expected.detach()
            allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(
                found, expected, rtol=0, atol=allowed, msg=lambda text: f"{self._case}, {what}: {text}"
            )

    def _dense(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self._sharded.named_parameters() if ".tables." not in name]


def part(whole: Tensor, shard: Any) -> Tensor:
    """The rows and columns of a shard."""
    rows = slice(shard.row_offset, shard.row_offset + shard.num_rows)
    return whole[rows, shard.col_offset : shard.col_offset + shard.num_cols]
