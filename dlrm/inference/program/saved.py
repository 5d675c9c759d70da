"""Puts a saved state together as one model that is not sharded, a table at a time, on the host."""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cpr.checkpoint.catalog.chain import State, own_states
from cpr.checkpoint.interop.full_model import FullModel
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import CorruptFileError, MismatchError, NoUsableStateError
from cpr.humanize import size_text
from cpr.shards.row_ids import ID, LAST_SEEN, is_dynamic, rows_of_ids
from dlrm.inference.program.tables import (
    RowFormat,
    Rows,
    collections_of,
    replace_collection,
    table_names,
)
from dlrm.sharding.memory import host_memory_bytes
from dlrm.sharding.pooled import table_name
from dlrm.sharding.splitting.head import Head

logger = logging.getLogger(__name__)


def load_whole(uri: str, make: Callable[[], nn.Module], rows: RowFormat) -> tuple[nn.Module, State]:
    """The newest state that can be read as a model whose tables are whole.

    Args:
        uri: of the checkpoint directory.
        make: makes the model, its tables on the meta device.
        rows: how rows are stored.

    Raises:
        ValueError: nothing was saved, or the tables do not fit into memory.
        CheckpointError: no state can be read, or it is of another model.
    """
    storage = open_storage(uri)
    states, rejected = own_states(storage)
    reasons = [f"save {save.sequence}: {save.reason}" for save in rejected if not save.unfinished]
    if not states and not reasons:
        raise ValueError(
            f"nothing was ever saved in {storage.uri}: train with checkpoint.every_steps (or, for the best "
            "save, train.keep_best)"
        )
    for state in states:
        try:
            return _whole(FullModel(storage, state), make(), rows), state
        except CorruptFileError as error:
            reasons.append(f"save {state.sequence}: {error}")
            logger.warning("save %d is passed over: %s", state.sequence, error)
    raise NoUsableStateError(f"{storage.uri} holds no state that can be exported: {'; '.join(reasons)}")


def _whole(saved: FullModel, model: nn.Module, rows: RowFormat) -> nn.Module:
    _check_memory(saved, model, rows)
    heads = {path: head for path, head in model.named_modules() if isinstance(head, Head)}
    split = [path for path, head in heads.items() if head.has_weights and _is_split(saved, path)]
    _load_dense(saved, model, split)
    for path in split:
        heads[path].merge(lambda prefix, path=path: _operator_rows(saved, path, prefix, heads[path].names))  # type: ignore[misc]
    for path, collection in collections_of(model).items():
        tables = {
            config.name: _read(saved, fqn, config, rows) for fqn, config in table_names(path, collection)
        }
        replace_collection(model, path, collection, tables)
    return model.eval().requires_grad_(False)


def _check_memory(saved: FullModel, model: nn.Module, rows: RowFormat) -> None:
    sizes = [
        Rows.num_bytes(config.num_embeddings, config.embedding_dim, rows)
        for path, collection in collections_of(model).items()
        for _, config in table_names(path, collection)
    ]
    needed, there = sum(sizes) + 2 * max(sizes, default=0), host_memory_bytes()
    if needed > there:
        raise ValueError(
            f"the program needs {size_text(needed)} of memory (all tables, and two copies of the largest one "
            f"while it is written), and this machine has {size_text(there)}: export on a larger one"
            + (", or with --rows int8" if rows == "fp32" else "")
        )


def _is_split(saved: FullModel, path: str) -> bool:
    """Whether the weights of a head were saved in tables."""
    return any(fqn.startswith(f"{path}.") and not fqn.startswith(f"{path}.tables.") for fqn in saved.tables)


@torch.no_grad()
def _load_dense(saved: FullModel, model: nn.Module, split: Sequence[str]) -> None:
    """Load everything but tables; what split heads have in tables is left out."""
    in_collections = tuple(f"{path}." for path in collections_of(model))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.startswith(in_collections):
            continue
        found = saved.tensors.get(("model", name))
        may_differ = name.startswith(tuple(f"{path}." for path in split))
        if found is not None and found.shape == tensor.shape:
            tensor.copy_(found)
        elif found is not None and may_differ and found.dim() == 2:
            tensor[:, : found.shape[1]] = found
        elif not may_differ:
            there = "nothing" if found is None else f"{list(found.shape)}"
            raise MismatchError(f"{name} is {list(tensor.shape)} in the model, and {there} was saved of it")


def _operator_rows(saved: FullModel, path: str, prefix: str, names: Sequence[str]) -> Tensor:
    """Rows of the operator tables of a prefix, fields in canonical order, a dense vector first."""
    fqns = {
        fqn.rpartition(".")[2]: fqn
        for fqn in saved.tables
        if fqn.startswith(f"{path}.") and fqn.rpartition(".")[2].startswith(prefix)
    }
    of_features = [fqns.pop(table_name(prefix, name)) for name in names]
    return torch.cat([_windows(saved, fqn) for fqn in (*fqns.values(), *of_features)])


def _windows(saved: FullModel, fqn: str) -> Tensor:
    return torch.cat([saved.window(fqn, first)["weights"] for first in saved.starts(fqn)])


def _read(saved: FullModel, fqn: str, config: "object", rows: RowFormat) -> Rows:
    """Read a table window by window."""
    if fqn not in saved.tables:
        raise MismatchError(f"nothing was saved of table {fqn}; there are {', '.join(saved.tables)}")
    columns = {column.name: column for column in saved.tables[fqn]}
    num_rows, dim = columns["weights"].shape
    if (num_rows, dim) != (config.num_embeddings, config.embedding_dim):  # type: ignore[attr-defined]
        raise MismatchError(f"table {fqn} was saved with {num_rows} rows of {dim} columns")
    if is_dynamic(columns):
        return _read_dynamic(saved, fqn, dim, rows)
    table = Rows(num_rows, dim, rows)
    for first in saved.starts(fqn):
        values = saved.window(fqn, first)["weights"]
        table.fill(slice(first, first + len(values)), values)
    return table


def _read_dynamic(saved: FullModel, fqn: str, dim: int, rows: RowFormat) -> Rows:
    """Read the rows that have ids, sorted by id; of several rows of an id, the one seen last."""
    windows = (saved.window(fqn, first) for first in saved.starts(fqn))
    parts = [(window[ID], window[LAST_SEEN], window["weights"]) for window in windows]
    ids, seen, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    used = rows_of_ids(ids, seen)
    # without any id, id 0 has a row of zeros, because a search needs one
    table = Rows(max(1, len(used)), dim, rows, ids[used] if len(used) else torch.zeros(1, dtype=torch.int64))
    if len(used):
        table.fill(slice(0, len(used)), weights[used])
    return table
