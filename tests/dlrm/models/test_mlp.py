"""Fully connected layers against torch's own, and the rounding of mixed precision."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from dlrm.models.mlp import MLP, Linear, LogitMLP, product


def reference_of(layer):
    """`nn.Linear` with the same weights, in float64."""
    reference = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    reference.load_state_dict(layer.state_dict())
    return reference.double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("batch", "width_in", "width_out"), [(1, 13, 64), (128, 64, 1), (33, 479, 512)])
def test_equals_torch_in_fp32(batch, width_in, width_out, relu, bias):
    torch.manual_seed(0)
    layer = Linear(width_in, width_out, relu=relu, bias=bias)
    reference = reference_of(layer)
    x = torch.randn(batch, width_in, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    out, expected = layer(x), reference(x64)
    expected = expected.relu() if relu else expected
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad.double())
    pairs = [(x.grad, x64.grad), (layer.weight.grad, reference.weight.grad)]
    if bias:
        pairs.append((layer.bias.grad, reference.bias.grad))
    for found, wanted in pairs:
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_stack_equals_torch_and_leaves_the_callers_gradient_alone():
    torch.manual_seed(0)
    stack = MLP(13, (64, 33, 8))
    reference = nn.Sequential(*(step for layer in stack for step in (reference_of(layer), nn.ReLU())))
    x = torch.randn(50, 13, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    out, expected = stack(x), reference(x64)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    handed_in = grad.clone()
    out.backward(handed_in)
    expected.backward(grad.double())
    assert torch.equal(handed_in, grad)
    found = [x.grad, *(parameter.grad for parameter in stack.parameters())]
    wanted = [x64.grad, *(parameter.grad for parameter in reference.parameters())]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_only_required_gradients_are_computed():
    """A frozen bias, and an input without gradient, as the dense features are."""
    stack = MLP(5, (7, 3))
    stack[0].bias.requires_grad_(False)
    stack(torch.randn(4, 5)).sum().backward()
    assert stack[0].bias.grad is None
    assert all(stack[layer].weight.grad is not None for layer in (0, 1))


ONE_STEP = """
import torch
from dlrm.models.mlp import LogitMLP
torch.manual_seed(0)
head = LogitMLP(13, (64, 32, 1))
x = torch.randn(50, 13)
close = []
for dtype in (torch.float32, torch.bfloat16):
    head.zero_grad()
    out = head(x.to(dtype))
    out.sum().backward()
    close.append((out.detach(), head.hidden[0].weight.grad.clone()))
for one, other in zip(*close):
    assert (one - other).norm() < 0.1 * one.norm()
"""


def test_bfloat16_runs_without_onednn_support():
    """oneDNN emulates a processor without AVX-512 if the environment asks for it before its first use."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", ONE_STEP], env=environment, check=True, timeout=60)


def test_the_bias_gradient_sums_in_fp32():
    """4096 ones summed in bfloat16 one after the other would stop at 256."""
    layer = Linear(4, 4, relu=False)
    layer(torch.randn(4096, 4).to(torch.bfloat16)).sum().backward()
    assert layer.bias.grad.tolist() == [4096.0] * 4


@pytest.mark.parametrize("widths", [(1,), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_fp32_and_of_either_sign(widths, dtype):
    torch.manual_seed(0)
    logits = LogitMLP(13, widths)(torch.randn(200, 13).to(dtype))
    assert logits.shape == (200,)
    assert logits.dtype == torch.float32
    assert (logits < 0).any()
    assert (logits > 0).any()


def test_initial_values_have_the_published_variance():
    torch.manual_seed(0)
    layer = Linear(400, 600, relu=True)
    assert layer.weight.std().item() == pytest.approx((2 / 1000) ** 0.5, rel=0.02)
    assert layer.bias.std().item() == pytest.approx((1 / 600) ** 0.5, rel=0.1)


def test_a_bias_may_be_a_column_of_a_table():
    """As that of a split cross layer, which oneDNN would read as if it were dense."""
    torch.manual_seed(0)
    x, weight, biases = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6, 3)
    for bias in biases.unbind(1):
        torch.testing.assert_close(product(x, weight, bias), x @ weight.t() + bias)
