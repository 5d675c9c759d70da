"""Fully connected layers with fp32 master weights that compute in the dtype of their input.

Mixed precision without autocast: for a bfloat16 input, the layers round their weights once a step, multiply
in bfloat16 and return fp32 gradients. A whole stack of layers with ReLUs is one autograd node, which keeps
the overhead of small steps low.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

HAS_AVX512: Final = torch.backends.cpu.get_cpu_capability() == "AVX512"


def _onednn_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that oneDNN multiplies faster than PyTorch does on this processor.

    bfloat16 where it can at all, which on x86 needs AVX-512; fp32 only with AVX-512 (without, MKL's products
    take 0.6 to 0.95 of oneDNN's time, the more the smaller they are).
    """
    available = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
    if not available:
        return frozenset()
    takes_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    takes = {torch.float32: HAS_AVX512, torch.bfloat16: takes_bf16}
    return frozenset(dtype for dtype, is_taken in takes.items() if is_taken)


ONEDNN_DTYPES: Final = _onednn_dtypes()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Compute `x @ weight.t() + bias` and an optional ReLU; on the CPU by torch.compile's oneDNN call."""
    is_here = x.device.type == "cpu" and not torch.compiler.is_exporting()  # programs run on other machines
    if is_here and x.dtype in ONEDNN_DTYPES and weight.numel():
        linear = torch.ops.mkldnn._linear_pointwise.default
        bias = None if bias is None else bias.contiguous()  # oneDNN reads a column as if it were dense
        out: Tensor = linear(x, weight, bias, "relu" if relu else "none", [], "")
        return out
    out = functional.linear(x, weight, bias)
    return out.relu_() if relu else out


def _through_relu(grad: Tensor, out: Tensor, in_place: bool) -> Tensor:
    """Gradient before a ReLU whose output was `out`, from the gradient after it."""
    backward = torch.ops.aten.threshold_backward
    before: Tensor = (
        backward.grad_input(grad, out, 0, grad_input=grad) if in_place else backward.default(grad, out, 0)
    )
    return before


def _master(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the parameters for inputs of `dtype`: fp32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _weight_gradient(grad: Tensor, x: Tensor, by_columns: bool) -> Tensor:
    """Compute `grad.t() @ x` in the dtype and memory layout (by rows or columns) of the weight."""
    if by_columns:
        return (x.t() @ grad).to(_master(x.dtype)).t()
    if HAS_AVX512 and x.dtype == torch.float32 and x.shape[1] % 2:
        # there MKL takes up to 3 times as long if rows of the result have an odd length
        return (x.t() @ grad).t().contiguous()
    return (grad.t() @ x).to(_master(x.dtype))


class _Layers(torch.autograd.Function):
    """A stack of layers; `parameters` are all weights, then all biases, which may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, relu: bool, *parameters: Tensor | None) -> Tensor:
        ctx.relu, ctx.depth = relu, len(parameters) // 2
        rounded = [None if each is None else each.to(x.dtype) for each in parameters]
        weights, biases = rounded[: ctx.depth], rounded[ctx.depth :]
        activations = [x]
        for weight, bias in zip(weights, biases, strict=True):
            activations.append(_product(activations[-1], cast("Tensor", weight), bias, relu))
        ctx.save_for_backward(*weights, *(activations if relu else activations[:-1]))
        return activations[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        depth = ctx.depth
        weights, activations = ctx.saved_tensors[:depth], ctx.saved_tensors[depth:]
        wanted = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * (2 * depth)
        for layer in reversed(range(depth)):
            if ctx.relu:
                # the last layer's gradient belongs to the caller
                grad = _through_relu(grad, activations[layer + 1], in_place=layer < depth - 1)
            by_columns = weights[layer].stride(0) == 1 < weights[layer].stride(1)
            gradients[layer] = _weight_gradient(grad, activations[layer], by_columns)
            if wanted[2 + depth + layer]:
                gradients[depth + layer] = grad.sum(0).to(_master(grad.dtype))  # sum accumulates in fp32
            if layer > 0 or wanted[0]:
                grad = _product(grad, weights[layer].t(), None, relu=False)
        return grad if wanted[0] else None, None, *gradients


def _run(x: Tensor, layers: Sequence["Linear"], relu: bool) -> Tensor:
    """Run `x` through `layers`, all with a ReLU or all without."""
    apply = cast("Callable[..., Tensor]", _Layers.apply)
    return apply(x, relu, *(layer.weight for layer in layers), *(layer.bias for layer in layers))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.t() + bias` like `Linear`, with a given weight `[out, in]` and bias `[out]`."""
    apply = cast("Callable[..., Tensor]", _Layers.apply)
    return apply(x, False, weight, bias)


class Linear(nn.Linear):
    """A linear layer with an optional ReLU, for inputs `[B, in]` in fp32 or bfloat16.

    The initial values are those of facebookresearch/dlrm: weights from N(0, 2 / (in + out)), biases from N(0,
    1 / out).
    """

    def __init__(self, in_features: int, out_features: int, relu: bool, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.relu = relu
        if not in_features:
            self.narrow(0)  # optimizers and exchanges get no parameter without numbers

    def reset_parameters(self) -> None:
        """Draw the initial weights and biases."""
        nn.init.normal_(self.weight, std=(2 / (self.in_features + self.out_features)) ** 0.5)
        if self.bias is not None:
            nn.init.normal_(self.bias, std=(1 / self.out_features) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, in]` to `[B, out]`, in the dtype of `x`."""
        return _run(x, [self], self.relu)

    def narrow(self, in_features: int) -> None:
        """Keep the weights of the first `in_features` inputs; with 0, the weight becomes an empty buffer."""
        weight = self.weight.detach()[:, :in_features].clone()
        if in_features:
            self.weight = nn.Parameter(weight)
        else:
            del self.weight
            self.register_buffer("weight", weight, persistent=False)
        self.in_features = in_features


def draw_as_torchrec(module: nn.Module) -> None:
    """Redraw the values of a `Linear` like TorchRec's, uniform in +-1 / sqrt(in); for `nn.Module.apply`."""
    if isinstance(module, Linear):
        nn.Linear.reset_parameters(module)


class MLP(nn.Sequential):
    """Linear layers of the given output widths, with a ReLU after each."""

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        layers = []
        for width in widths:
            layers.append(Linear(in_features, width, relu=True))
            in_features = width
        super().__init__(*layers)

    def forward(self, x: Tensor, product: Tensor | None = None) -> Tensor:
        """Map `[B, in]` to `[B, last width]`, in the dtype of `x`; without layers to `x` itself.

        `product`, `[B, first width]`, is added to the first layer's output: what other inputs contribute.
        """
        layers = [cast("Linear", layer) for layer in self]
        if product is not None:
            x, layers = (_run(x, layers[:1], relu=False) + product).relu(), layers[1:]
        return _run(x, layers, relu=True) if layers else x


class LogitMLP(nn.Module):
    """An MLP that ends in one logit; the last layer is fp32, as bfloat16 cannot tell close scores apart."""

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        super().__init__()
        *hidden, last = widths
        self.hidden = MLP(in_features, hidden)
        self.logit = Linear(hidden[-1] if hidden else in_features, last, relu=False)

    @property
    def first(self) -> Linear:
        """The first layer, which may also be the last."""
        return cast("Linear", self.hidden[0]) if len(self.hidden) else self.logit

    def first_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the first layer runs for inputs of `dtype`."""
        return dtype if len(self.hidden) else _master(dtype)

    def forward(self, x: Tensor, product: Tensor | None = None) -> Tensor:
        """Map `[B, in]` to fp32 logits `[B]`; `product` as for `MLP`, in `first_dtype`."""
        if len(self.hidden):
            x, product = self.hidden(x, product), None
        logits = functional.linear(x.to(_master(x.dtype)), self.logit.weight, self.logit.bias)
        return (logits if product is None else logits + product).squeeze(1)
