"""Makes a program of a model by torch.export: dense values, ids and offsets in, logits out."""

import io
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from data.batch import Batch
from data.dataset import Feature
from dlrm.models.build import describe
from dlrm.models.contract import Objective

Inputs = tuple[Any, ...]
"""Arguments of a program: dense, values, offsets, and weights if any feature has them."""

EXAMPLE_SAMPLES: Final = 3
ALLOWED: Final = frozenset({"aten", "prim", "prims", "_operator"})
"""Namespaces of operators that torch alone has on every machine."""


class _Bags(KeyedJaggedTensor):  # type: ignore[misc]
    """Ids of a batch whose features are looked up by name without a computation."""

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Bags of each feature."""
        bags: dict[str, JaggedTensor] = self._jt_dict
        return bags

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]


class Program(nn.Module):
    """A model with plain tensors as inputs.

    Args:
        model: not sharded, its tables whole.
        features: of the data, in order.
    """

    def __init__(self, model: nn.Module, features: Sequence[Feature]) -> None:
        super().__init__()
        self.model = model
        self.features = features
        self._objective = Objective(model)

    def forward(
        self,
        dense: Tensor,
        values: dict[str, Tensor],
        offsets: dict[str, Tensor],
        weights: dict[str, Tensor] | None = None,
    ) -> Any:
        """Compute fp32 logits `[B]`; if the model has none its outputs, of a dataclass as a dict by field.

        Args:
            dense: float32 `[B, D]`.
            values: by feature, the ids of all bags, int64 `[N]`.
            offsets: by feature, int64 `[B + 1]`: sample i has the ids `values[offsets[i]:offsets[i + 1]]`.
            weights: of the features that have some, float32 `[N]`.
        """
        outputs = self.model(dense, self._bags(dense.shape[0], values, offsets, weights))
        logits = self._objective.logits(outputs)
        if logits is None and is_dataclass(outputs):  # whose class torch alone does not have
            return {field.name: getattr(outputs, field.name) for field in fields(outputs)}
        return outputs if logits is None else logits

    def _bags(
        self,
        batch: int,
        values: Mapping[str, Tensor],
        offsets: Mapping[str, Tensor],
        weights: Mapping[str, Tensor] | None,
    ) -> _Bags:
        names, bags = [feature.name for feature in self.features], {}
        for feature in self.features:
            name, ids = feature.name, values[feature.name]
            own = None
            if weights is not None:
                own = weights[name] if feature.weights else torch.ones_like(ids, dtype=torch.float32)
            bags[name] = JaggedTensor(ids, weights=own, lengths=offsets[name].diff(), offsets=offsets[name])
        sizes = [values[name].shape[0] for name in names]
        ends = [*accumulate(sizes, initial=0)]
        starts = [bags[name].offsets()[:-1] + end for name, end in zip(names, ends, strict=False)]
        return _Bags(
            keys=names,
            values=torch.cat([bag.values() for bag in bags.values()]),
            weights=None if weights is None else torch.cat([bag.weights() for bag in bags.values()]),
            lengths=torch.cat([bag.lengths() for bag in bags.values()]),
            offsets=torch.cat([*starts, bags[names[-1]].offsets()[-1:] + ends[-2]]),
            stride=batch,
            length_per_key=sizes,
            offset_per_key=ends,
            index_per_key={name: place for place, name in enumerate(names)},
            jt_dict=bags,
        )


def inputs_of(batch: Batch, features: Sequence[Feature]) -> Inputs:
    """The arguments of a program for a batch of the loader."""
    bags: Mapping[str, JaggedTensor] = batch.sparse.to_dict()
    values = {name: bag.values() for name, bag in bags.items()}
    offsets = {name: bag.offsets() for name, bag in bags.items()}
    weights = {feature.name: bags[feature.name].weights() for feature in features if feature.weights}
    return (batch.dense, values, offsets, *([weights] if weights else []))


def example(
    features: Sequence[Feature],
    num_dense: int,
    num_samples: int = EXAMPLE_SAMPLES,
    with_one_id: Collection[str] = (),
) -> Inputs:
    """Samples with two ids 0 per feature, or one for some features."""
    counts = {each.name: 1 if each.name in with_one_id else 2 for each in features}
    dense = torch.linspace(0, 1, num_samples * num_dense).view(num_samples, num_dense)
    values = {name: torch.zeros(num * num_samples, dtype=torch.int64) for name, num in counts.items()}
    offsets = {name: torch.arange(num_samples + 1) * num for name, num in counts.items()}
    weights = {each.name: torch.ones(len(values[each.name])) for each in features if each.weights}
    return (dense, values, offsets, *([weights] if weights else []))


def features_with_one_id(inputs: Inputs) -> list[str]:
    """Features that have exactly one id in every one of these samples."""
    return [name for name, offsets in inputs[2].items() if bool((offsets.diff() == 1).all())]


def trace(program: Program, num_dense: int, kind: str, with_one_id: Collection[str] = ()) -> ExportedProgram:
    """Trace a program for any number of samples and ids.

    Args:
        program: the model with plain inputs.
        num_dense: number of dense columns.
        kind: of the model, for messages.
        with_one_id: features of which every sample has exactly one id.

    Raises:
        ValueError: the model cannot be traced, or uses operators that torch alone lacks; says what to change.
    """
    features = program.features
    arguments = example(features, num_dense, with_one_id=with_one_id)
    batch = Dim("batch", min=0)
    ids = {
        each.name: {0: batch if each.name in with_one_id else Dim(f"ids_{place}", min=0)}
        for place, each in enumerate(features)
    }
    shapes: list[Any] = [{0: batch}, ids, {name: {0: batch + 1} for name in ids}]
    if len(arguments) > len(shapes):
        shapes.append({name: ids[name] for name in arguments[-1]})
    oblivious = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    try:
        # sizes of 0 and 1 are not taken for other cases than larger ones: a batch may have one sample
        with torch.no_grad(), warnings.catch_warnings(), oblivious, redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # and torch.export prints the graph of what it cannot trace
            program(*arguments)  # makes indexes that models make in their first call
            exported: ExportedProgram = torch.export.export(
                program, arguments, dynamic_shapes=tuple(shapes), strict=False
            )
            exported = exported.run_decompositions(dict(_replacements()))
    except Exception as error:
        what, _, place = describe(error, type(program.model).__module__).rpartition(" (")
        what = re.split(r" \(Size-like| Caused by:| The error above", what)[0][:MOST_CHARACTERS]
        raise ValueError(
            f"model.kind: torch.export cannot trace {kind}: {what} ({place}. Its forward must not depend on "
            "values of tensors (`if`, .item(), .tolist()) or on the number of samples or ids (`len`): use "
            "torch.where and masks; and give tensors, or a tuple, dict or dataclass of them"
        ) from error
    _check_operators(exported, kind)
    return exported


MOST_CHARACTERS: Final = 400
"""Of the reason why a model cannot be traced, of which torch.export writes pages."""


def _check_operators(exported: ExportedProgram, kind: str) -> None:
    targets = [node.target for node in exported.graph.nodes if node.op == "call_function"]
    found = {target.namespace: str(target) for target in targets if hasattr(target, "namespace")}
    if others := sorted(found.keys() - ALLOWED):
        raise ValueError(
            f"model.kind: {kind} uses the operator {found[others[0]]}, which torch alone does not have: use "
            "operators of PyTorch (torch.*) instead"
        )


def _replacements() -> Mapping[Any, Callable[..., Any]]:
    """FBGEMM's operators of `JaggedTensor`, in plain PyTorch."""
    return {
        torch.ops.fbgemm.asynchronous_complete_cumsum.default: _complete_cumsum,
        torch.ops.fbgemm.jagged_to_padded_dense.default: _padded,
    }


def _complete_cumsum(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _padded(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0
) -> Tensor:
    """Values `[N, ...]` of bags with `offsets` `[B + 1]` as `[B, length, ...]`, filled up or cut off."""
    (ends,), (length,) = offsets, max_lengths
    place = torch.arange(length, device=values.device)
    is_real = place < ends.diff().unsqueeze(1)
    padding = values.new_full((1, *values.shape[1:]), padding_value)
    return torch.cat([values, padding])[torch.where(is_real, ends[:-1].unsqueeze(1) + place, values.shape[0])]
