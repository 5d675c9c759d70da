"""Tries a class of the user before training: one step and one evaluation of a few samples.

The model is made once more, with at most `MOST_ROWS` rows a table and random values in them, and runs on the
CPU. So a mistake is found before there is a process group, tables or a run folder.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from data.batch import Batch
from data.dataset import Feature
from dlrm.config.goal import BUILT_IN
from dlrm.config.schema import ModelConfig
from dlrm.models.build import build_model, describe
from dlrm.models.contract import Objective
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.plan import check_tables, tables_of

logger = logging.getLogger(__name__)

MOST_ROWS: Final = 1000
CPU: Final = torch.device("cpu")
OUTPUTS_MATCH: Final = 0.05
"""Outputs that differ by more, as a share of their spread, are not the same; bfloat16 differs by less."""


def check_model(
    config: ModelConfig,
    features: Sequence[Feature],
    dense: Sequence[str],
    dtype: torch.dtype,
    batch: Batch,
    dynamic: Collection[str] = (),
) -> tuple[bool, Sequence[str]]:
    """Refuse a class that does not do what `dlrm/models/README.md` asks of it.

    Args:
        config: names the class.
        features: sparse features with the rows of their tables.
        dense: names of the dense features.
        dtype: of the arithmetic.
        batch: a few samples of the data, on the CPU.
        dynamic: features with dynamic tables, whose ids may be larger than the rows.

    Returns:
        Whether the model gives logits, and the names of its own metrics.

    Raises:
        ValueError: says what to change in the class.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model(config, features, dense, dtype)
        return _Trial(model, config.kind, batch).check(features, dynamic)


class _Trial:
    """A model of the user that is tried on a batch."""

    def __init__(self, model: nn.Module, kind: str, batch: Batch) -> None:
        self._model, self._kind, self._batch = model, kind, batch
        self._objective = Objective(model)
        self._shape = batch.labels.shape

    def check(self, features: Sequence[Feature], dynamic: Collection[str]) -> tuple[bool, Sequence[str]]:
        self._check_parameters()
        self._check_rows({each.name: each.rows for each in features if each.name not in dynamic})
        self._warn_of_unread(features)
        for collection in _collections(self._model):
            _materialize(collection)
        self._model.train()
        outputs = self._forward()
        self._check_outputs(outputs)
        self._check_loss(outputs)
        self._model.eval()
        with torch.no_grad():
            outputs = self._forward()
            has_logits, metrics = self._check_logits(outputs), self._check_metrics(outputs)
            self._check_order(outputs)
        return has_logits, metrics

    def _refuse_unless(self, is_right: bool, message: str) -> None:
        if not is_right:
            raise ValueError(f"model.kind: {self._kind}{message}")

    def _call(self, name: str, method: Callable[..., Any], *arguments: Any, hint: str = "") -> Any:
        try:
            return method(*arguments)
        except (Exception, SystemExit) as error:
            what = describe(error, type(self._model).__module__)
            raise ValueError(f"model.kind: {self._kind}.{name} raised {what}{hint}") from error

    def _check_parameters(self) -> None:
        of_tables = [each for module in _collections(self._model) for each in module.parameters()]
        self._refuse_unless(
            bool(of_tables), " has no tables: make a TorchRec EmbeddingBagCollection or EmbeddingCollection"
        )
        self._refuse_unless(
            all(each.is_meta for each in of_tables),
            " makes its tables in memory: give the collection device=torch.device('meta'), so that they are "
            "allocated when they are sharded",
        )
        dense = dense_parameters(self._model)
        self._refuse_unless(
            any(each.requires_grad for each in dense),
            " has no trained parameter outside its tables: add one, such as a bias or a temperature",
        )
        self._refuse_unless(
            not any(each.is_meta for each in dense),
            " has parameters on the meta device outside its tables: make them on the CPU",
        )
        is_weighted = any(
            each.is_weighted()
            for each in _collections(self._model)
            if isinstance(each, EmbeddingBagCollection)
        )
        self._refuse_unless(
            not is_weighted or self._batch.sparse.weights_or_none() is not None,
            " has a collection with is_weighted=True, and the data has no weights: make it "
            "is_weighted=any(feature.weights for feature in inputs.features)",
        )
        check_tables(self._model, CPU)

    def _check_rows(self, rows: Mapping[str, int]) -> None:
        for table in tables_of(self._model):
            for name in table.feature_names:
                self._refuse_unless(
                    rows.get(name, 0) <= table.num_embeddings,
                    f": table {table.name} has {table.num_embeddings:,} rows, and feature {name} has ids up "
                    f"to {rows.get(name, 0) - 1:,}: take feature.rows, or prepare the data with fewer",
                )

    def _warn_of_unread(self, features: Sequence[Feature]) -> None:
        read = {name for table in tables_of(self._model) for name in table.feature_names}
        if unread := ", ".join(each.name for each in features if each.name not in read):
            logger.warning("%s has no table for %s: it learns nothing from that", self._kind, unread)

    def _forward(self) -> Any:
        dense, sparse = self._batch.dense, self._batch.sparse
        names = ", ".join(sparse.keys())
        read = {name for table in tables_of(self._model) for name in table.feature_names}
        lacking = ", ".join(sorted(read - {*sparse.keys()}))
        hint = f"; the data has no feature {lacking}, but {names}" if lacking else ""
        return self._call("forward", self._model, dense, sparse, hint=hint)

    def _check_outputs(self, outputs: Any) -> None:
        missing = [name for name in ("loss", "logits") if not hasattr(self._model, name)]
        self._refuse_unless(
            not missing or _is(outputs, self._shape, torch.float32),
            f".forward gives {_text(outputs)}, and the class has no {' and no '.join(missing)}: give fp32 "
            f"logits {[*self._shape]}, one for each sample, or add loss(outputs, labels) and logits(outputs) "
            "(which may return None)",
        )

    def _check_loss(self, outputs: Any) -> None:
        loss = self._call("loss", self._objective.loss, outputs, self._batch.labels)
        self._refuse_unless(
            isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point(),
            f".loss gives {_text(loss)}: give the mean over the samples, a scalar",
        )
        self._refuse_unless(
            loss.requires_grad,
            ".loss depends on no parameter: compute it from the outputs, without detach() or item()",
        )
        self._call("loss", loss.backward)
        named = [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]
        unused = [name for name, each in named if each.grad is None]
        self._refuse_unless(
            not unused,
            f": the loss does not depend on {', '.join(unused[:3])}{' ...' * (len(unused) > 3)}: use it in "
            "forward, remove it, or (not a table) call requires_grad_(False) on it",
        )

    def _check_logits(self, outputs: Any) -> bool:
        logits = self._call("logits", self._objective.logits, outputs)
        self._refuse_unless(
            logits is None or (_is(logits, self._shape) and logits.is_floating_point()),
            f".logits gives {_text(logits)}: give one for each sample, {[*self._shape]}, or None",
        )
        return logits is not None

    def _check_metrics(self, outputs: Any) -> list[str]:
        labels = self._batch.labels.clone()
        labels[-1] = torch.nan  # as padding has
        metrics = self._call("metrics", self._objective.metrics, outputs, labels)
        self._refuse_unless(
            isinstance(metrics, Mapping) and all(isinstance(name, str) for name in metrics),
            f".metrics gives {_text(metrics)}: give a dict of a value for each sample by name",
        )
        for name, each in metrics.items():
            self._refuse_unless(
                name not in BUILT_IN,
                f".metrics names one {name}, as evaluations do theirs: give it another name",
            )
            self._refuse_unless(
                _is(each, self._shape) and each.is_floating_point(),
                f".metrics gives {_text(each)} as {name}: give a float for each sample, {[*self._shape]}; NaN"
                " where it has none",
            )
        return list(metrics)

    def _check_order(self, outputs: Any) -> None:
        """Refuse a model that reads pooled features by position: their order depends on the sharding."""
        bags = [each for each in _collections(self._model) if isinstance(each, EmbeddingBagCollection)]
        hooks = [each.register_forward_hook(_reverse) for each in bags]
        leaves = zip(_leaves(outputs), _leaves(self._forward()), strict=False)
        for hook in hooks:
            hook.remove()
        self._refuse_unless(
            all(_alike(one, other) for one, other in leaves if isinstance(one, Tensor)),
            ".forward reads pooled features by their position, which depends on the sharding: take them by "
            "name, pooled[feature], or in an order of yours, KeyedTensor.regroup([pooled], [features])[0]",
        )


def _collections(model: nn.Module) -> list[nn.Module]:
    kinds = EmbeddingBagCollection | EmbeddingCollection
    return [module for module in model.modules() if isinstance(module, kinds)]


def _materialize(collection: nn.Module) -> None:
    """Give the tables few rows with random values, and let them take any ids."""
    tables: Any = getattr(collection, "embedding_bags", None) or collection.embeddings
    rows: dict[str, int] = {}
    for table, config in zip(tables.values(), tables_of(collection), strict=True):
        kept = min(config.num_embeddings, MOST_ROWS)
        table.weight = nn.Parameter(torch.randn(kept, config.embedding_dim))
        for name in config.feature_names:
            rows[name] = min(kept, rows.get(name, kept))

    def fold(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
        return _folded(arguments[0], rows)

    collection.register_forward_pre_hook(fold)


def _folded(sparse: KeyedJaggedTensor, rows: dict[str, int]) -> KeyedJaggedTensor:
    limits = torch.tensor([rows.get(name, MOST_ROWS) for name in sparse.keys()])  # noqa: SIM118  # no mapping
    counts = torch.tensor(sparse.length_per_key())
    return KeyedJaggedTensor(
        keys=sparse.keys(),
        values=sparse.values() % limits.repeat_interleave(counts),
        weights=sparse.weights_or_none(),
        lengths=sparse.lengths(),
    )


def _reverse(_: nn.Module, __: Any, pooled: KeyedTensor) -> KeyedTensor:
    names = pooled.keys()[::-1]
    return KeyedTensor.from_tensor_list(names, [pooled[name] for name in names])


def _leaves(outputs: Any) -> list[Any]:
    """The tensors in nested lists, dicts and dataclasses."""
    return [
        leaf
        for each in tree_leaves(outputs)
        for leaf in (_leaves(list(vars(each).values())) if is_dataclass(each) else [each])
    ]


def _alike(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    spread = float(one.float().abs().nan_to_num().mean())
    return torch.allclose(one.float(), other.float(), rtol=0, atol=OUTPUTS_MATCH * spread, equal_nan=True)


def _is(value: Any, shape: torch.Size, dtype: torch.dtype | None = None) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and dtype in {None, value.dtype}


def _text(value: Any) -> str:
    """A value in a message: shape and dtype of a tensor, or the type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    if isinstance(value, tuple | list) and not isinstance(value, JaggedTensor):
        return f"{type(value).__name__} of {', '.join(map(_text, value))}"
    return f"a {type(value).__name__}"
