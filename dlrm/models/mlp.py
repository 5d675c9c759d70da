"""Fully connected layers: fp32 master weights, arithmetic in the dtype of the input.

Mixed precision without autocast: a bfloat16 input makes the layer round its weights once a step,
multiply in bfloat16, and hand fp32 gradients to the fp32 weights. One autograd node a layer, ReLU
included, keeps the step's small work small.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

ONEDNN: Final[bool] = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """`x @ weight.t() + bias`, then ReLU; on the CPU one oneDNN call, the one that torch.compile uses."""
    if x.device.type == "cpu" and ONEDNN:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "relu" if relu else "none", [], "")
        return out
    out = functional.linear(x, weight, bias)
    return out.relu_() if relu else out


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
        rounded = weight.to(x.dtype)
        out = _product(x, rounded, None if bias is None else bias.to(x.dtype), relu)
        ctx.relu = relu
        ctx.save_for_backward(x, rounded, out if relu else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rounded, out = ctx.saved_tensors
        if ctx.relu:
            grad = torch.ops.aten.threshold_backward(grad, out, 0)
        grad_x = _product(grad, rounded.t(), None, relu=False) if ctx.needs_input_grad[0] else None
        grad_weight = (grad.t() @ x).to(torch.float32)
        grad_bias = grad.sum(0).to(torch.float32) if ctx.needs_input_grad[2] else None  # sums in fp32
        return grad_x, grad_weight, grad_bias, None


class Linear(nn.Linear):
    """A linear layer with an optional ReLU, for inputs `[B, in]` in fp32 or bfloat16.

    Args:
        in_features: input width.
        out_features: output width.
        relu: apply ReLU to the output.
        bias: add a bias.

    The initial values are those of facebookresearch/dlrm: weights from N(0, 2 / (in + out)), biases
    from N(0, 1 / out).
    """

    def __init__(self, in_features: int, out_features: int, relu: bool, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.relu = relu

    def reset_parameters(self) -> None:
        """Draw the initial weights and biases."""
        nn.init.normal_(self.weight, std=(2 / (self.in_features + self.out_features)) ** 0.5)
        if self.bias is not None:
            nn.init.normal_(self.bias, std=(1 / self.out_features) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, in]` to `[B, out]`, in the dtype of `x`."""
        apply = cast("Callable[..., Tensor]", _LinearReLU.apply)
        return apply(x, self.weight, self.bias, self.relu)


class MLP(nn.Sequential):
    """Linear layers with ReLU after each.

    Args:
        in_features: input width.
        widths: output width of each layer.
    """

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        layers = []
        for width in widths:
            layers.append(Linear(in_features, width, relu=True))
            in_features = width
        super().__init__(*layers)


class Head(nn.Module):
    """An MLP that ends in one logit.

    The last layer runs in fp32, because bfloat16 cannot tell close scores apart.

    Args:
        in_features: input width.
        widths: output width of each layer; the last is 1.
    """

    def __init__(self, in_features: int, widths: Sequence[int]) -> None:
        super().__init__()
        *hidden, last = widths
        self.hidden = MLP(in_features, hidden)
        self.logit = Linear(hidden[-1] if hidden else in_features, last, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, in]` to fp32 logits `[B]`."""
        x = self.hidden(x).to(torch.float32)
        return functional.linear(x, self.logit.weight, self.logit.bias).squeeze(1)
