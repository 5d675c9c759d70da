"""Weights of a split operator, stored as tables on the ranks of the fields that they are multiplied with.

A first fully connected layer over all embeddings has some rows of its weight for each field, and so has a
cross layer. The rows of a field lie on its rank, as one more table of which every row is read in every step.
As TorchRec tables they are updated in the backward pass, listed by `state_dict`, saved and recovered like any
other. Their optimizer is that of the dense parameters, which they are in the unsplit model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from cpr.shards import table_groups
from dlrm.config.schema import COLUMN_STEP, DenseConfig
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.pooled import pooled_tables, table_name

UPDATES: Final = {
    each.fbgemm_type: each.update_table for each in TABLE_OPTIMIZERS.values() if each.update_table is not None
}
"""Updates of operator weights on the CPU, by FBGEMM's optimizer type."""


def make_operator_sharder(dense: DenseConfig, device: torch.device) -> EmbeddingBagCollectionSharder:
    """Make TorchRec's sharder for operator tables, with the dense optimizer as their fused one.

    Raises:
        ValueError: FBGEMM lacks that optimizer on the device, or gradients are to be clipped, or added up by
            momentum.
    """
    if dense.clip_norm:
        raise ValueError(
            "weights of an operator are updated in the backward pass, before gradients can be clipped; set "
            "dense.clip_norm to 0, or sharding.strategy to torchrec"
        )
    if dense.momentum:
        raise ValueError(
            "weights of an operator are updated in the backward pass, by SGD without momentum; set "
            "dense.momentum to 0, or sharding.strategy to torchrec"
        )
    known = {name: each for name, each in TABLE_OPTIMIZERS.items() if device.type in each.operator_devices}
    if dense.optimizer not in known:
        raise ValueError(
            f"FBGEMM on {device.type} does not update the weights of an operator by {dense.optimizer}; set "
            f"dense.optimizer to one of {', '.join(sorted(known))}, or sharding.strategy to torchrec"
        )
    optimizer = known[dense.optimizer]
    return EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": optimizer.fbgemm_type,
            "learning_rate": dense.learning_rate,
            **optimizer.options,  # with PyTorch's defaults, as the other dense parameters have them
        }
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """Where the fields of a head split by tables live, and what is needed to put weights there."""

    fields: Mapping[str, ParameterSharding]
    """Sharding of each feature's table, in canonical order."""
    names: Sequence[str]
    """Features whose tables are on this rank, in the order of `Owned.values`."""
    sharder: EmbeddingBagCollectionSharder | None
    """From `make_operator_sharder`; None: heads with weights cannot be split."""
    env: ShardingEnv
    device: torch.device


class OperatorTables(nn.Module):
    """A weight `[F * rows, columns]` whose rows are distributed with the fields that they belong to.

    The tables are named by `prefix` and their feature (`table_name`), fields in canonical order.

    Raises:
        ValueError: a field's table is not on one rank, or there is no sharder.
    """

    def __init__(self, prefix: str, weight: Tensor, placement: Placement) -> None:
        super().__init__()
        if placement.sharder is None:
            raise ValueError(f"a head with weights ({prefix}*) needs a sharder for them to be split")
        self.columns = weight.shape[1]
        self._device = placement.device
        fields, width = placement.fields, -(-self.columns // COLUMN_STEP) * COLUMN_STEP
        rows = weight.shape[0] // len(fields)
        # padded to FBGEMM's column step; the zeros get zero gradients and stay zeros
        padded = nn.functional.pad(weight.detach(), (0, width - self.columns)).view(len(fields), rows, width)
        self._initial: dict[str, Tensor] | None = {
            table_name(prefix, name): padded[place].clone()
            for place, name in enumerate(fields)
            if name in placement.names
        }
        self.tables = placement.sharder.shard(
            pooled_tables(dict.fromkeys(fields, rows), width, prefix),
            {table_name(prefix, name): _plan_next_to(field, rows, width) for name, field in fields.items()},
            placement.env,
            placement.device,
        )
        (sharding,) = self.tables._embedding_shardings
        here = sharding.embedding_names_per_rank()[placement.env.rank]
        assert list(here) == list(placement.names), f"{here} are not in the order of {placement.names}"
        groups = list(table_groups(self))
        assert len(groups) <= 1, "tables of one width are one FBGEMM module"
        self._tbe: list[Any] = [
            group.emb_module for group in groups
        ]  # in a list, or it would be listed as a submodule twice
        for tbe in self._tbe:
            if placement.device.type == "cpu":
                tbe.forward = WholeTables(tbe)
        self._shape = (len(here), rows, width)
        # every lookup reads every row once
        self._ids = torch.arange(rows, device=placement.device).repeat(len(here))
        self._offsets = torch.arange(len(here) * rows + 1, device=placement.device)

    def initialize(self) -> None:
        """Set the tables to the rows of the unsplit model's weight; once, before the first `weight`."""
        assert self._initial is not None
        for group in table_groups(self):
            for table in group.tables:
                table.weights.copy_(self._initial[table.table_name])
        self._initial = None

    def weight(self) -> Tensor:
        """This rank's rows, fp32 `[rows of its fields, columns]`, which their gradient's arrival updates.

        Call it once per forward pass. A rank without fields gets an empty tensor that requires a gradient,
        because other ranks wait for it in the backward pass.
        """
        self._initial = None  # rows adopted from a dead worker must not be initialized
        num_fields, rows, width = self._shape
        if not self._tbe:
            return torch.zeros(0, self.columns, device=self._device, requires_grad=True)
        whole: Tensor = self._tbe[0](self._ids, self._offsets)
        if not isinstance(self._tbe[0].forward, WholeTables):  # [rows, fields * width]
            whole = whole.view(rows, num_fields, width).transpose(0, 1).reshape(-1, width)
        return whole if width == self.columns else whole[:, : self.columns]


def _plan_next_to(field: ParameterSharding, rows: int, width: int) -> ParameterSharding:
    """Plan a whole table `[rows, width]` on the rank of a field's table."""
    if field.sharding_type != ShardingType.TABLE_WISE.value:
        raise ValueError(
            f"operator weights need whole tables (table_wise); their field is sharded {field.sharding_type}"
        )
    (piece,) = cast("EnumerableShardingSpec", field.sharding_spec).shards
    spec = EnumerableShardingSpec(
        [ShardMetadata(shard_offsets=[0, 0], shard_sizes=[rows, width], placement=piece.placement)]
    )
    kernel = EmbeddingComputeKernel.FUSED.value
    return replace(field, compute_kernel=kernel, sharding_spec=spec, output_dtype=None)  # weights are fp32


class WholeTables:
    """Replaces the `forward` of an FBGEMM host module of which all rows are read, without a copy.

    FBGEMM and the host lookup would gather all rows and scatter all gradients. The tables are fp32 of one
    width.
    """

    def __init__(self, tbe: Any) -> None:
        self._tbe = tbe
        self._width = tbe.dims[0]
        self._anchor = torch.zeros((), requires_grad=True)  # so that backward is called

    @property
    def rows(self) -> Tensor:
        """All tables, one below the other, `[rows, width]`; live."""
        rows: Tensor = self._tbe.weights_host.detach().view(-1, self._width)
        return rows

    def __call__(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Return `rows`; the ids are only for hooks that watch lookups."""
        apply = cast("Callable[..., Tensor]", _ReadWhole.apply)
        return apply(self._anchor, self)

    def update(self, grad: Tensor) -> None:
        """Update all rows by the dense optimizer, as FBGEMM or PyTorch would."""
        update_table = UPDATES[self._tbe.optimizer]
        update_table(self._tbe, self.rows, grad)


class _ReadWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tables: WholeTables) -> Tensor:
        ctx.tables = tables
        return tables.rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.tables.update(grad)
        return None, None
