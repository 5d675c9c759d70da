"""Codecs: the error of each weight is within its bound and is reported."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpr.checkpoint.format.codecs import CODECS, codec_named

LOSSY_BITS = {"int8": 8, "int4": 4}
HALF = 2.0**-11
"""Relative rounding of float16; 2**-25 is the absolute one of its smallest numbers."""
SINGLE = 2.0**-24


@st.composite
def weights(draw: st.DrawFn, largest: float = 2.0**100) -> Tensor:
    """Float32 rows of any width, some of them constant, at any scale."""
    num_rows, num_cols = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    value = st.floats(-largest, largest, width=32) | st.floats(-1, 1, width=32)
    rows = st.lists(value, min_size=num_cols, max_size=num_cols) | value.map(lambda each: [each] * num_cols)
    return torch.tensor(draw(st.lists(rows, min_size=num_rows, max_size=num_rows)))


def there_and_back(name: str, given: Tensor) -> tuple[Tensor, float]:
    codec = codec_named(name)
    stored, max_error = codec.encode(given)
    dtype, width = codec.stored_as(given.dtype, given.shape[1])
    assert (stored.dtype, stored.shape) == (dtype, (given.shape[0], width))
    decoded = codec.decode(stored, given.dtype, given.shape[1])
    assert (decoded.dtype, decoded.shape) == (given.dtype, given.shape)
    return decoded, max_error


def errors(given: Tensor, decoded: Tensor) -> Tensor:
    return (given.double() - decoded.double()).abs()


@given(weights())
def test_exact_and_fp32_change_nothing(given):
    for name in ("exact", "fp32"):
        decoded, max_error = there_and_back(name, given)
        assert torch.equal(decoded.view(torch.int32), given.view(torch.int32))
        assert max_error == 0.0


@given(weights(largest=65_000.0))
def test_fp16_rounds_to_the_nearest_half(given):
    decoded, max_error = there_and_back("fp16", given)
    assert (errors(given, decoded) <= given.double().abs() * HALF + 2.0**-25).all()
    assert max_error == pytest.approx(errors(given, decoded).max().item(), rel=1e-6)


def test_fp16_saturates_and_says_by_how_much():
    given = torch.tensor([[1e6, -1e6, 2.0], [torch.inf, -torch.inf, torch.nan]])
    decoded, max_error = there_and_back("fp16", given)
    assert decoded[0].tolist() == [65_504.0, -65_504.0, 2.0]
    assert decoded[1, :2].tolist() == [torch.inf, -torch.inf]
    assert decoded[1, 2].isnan()
    assert max_error == 1e6 - 65_504.0
    assert there_and_back("fp16", given[1:, :2])[1] == 0.0, "without a finite value"


@settings(max_examples=300)
@given(weights())
def test_int8_errs_by_half_a_step(given):
    decoded, max_error = there_and_back("int8", given)
    low, high = given.double().amin(1, keepdim=True), given.double().amax(1, keepdim=True)
    span = high - low
    rounding = 4 * SINGLE * (span + low.abs() + high.abs())
    # FBGEMM adds 1e-8 to the span before it divides, which squeezes rows that span no more than that.
    assert (errors(given, decoded) <= span / 255 / 2 + rounding + 1e-8).all()
    assert max_error == pytest.approx(errors(given, decoded).max().item(), rel=1e-6)


@settings(max_examples=300)
@given(weights(largest=30_000.0))
def test_int4_errs_by_half_a_step_and_the_rounding_of_scale_and_bias(given):
    decoded, max_error = there_and_back("int4", given)
    low, high = given.double().amin(1, keepdim=True), given.double().amax(1, keepdim=True)
    of_bias = low.abs() * HALF + 2.0**-25
    step = (high - low + of_bias) / 15
    of_scale = step * HALF + 2.0**-25
    rounding = 4 * SINGLE * (high - low + low.abs() + high.abs())
    assert (errors(given, decoded) <= (step + of_scale) / 2 + of_bias + 15 * of_scale + rounding).all()
    assert max_error == pytest.approx(errors(given, decoded).max().item(), rel=1e-6)


@given(
    st.tuples(st.just("int8"), st.floats(-(2.0**100), 2.0**100, width=32))
    | st.tuples(st.just("int4"), st.floats(-60_000, 60_000, width=16)),
    st.integers(1, 9),
)
def test_constant_rows_are_exact_as_far_as_the_bias_can_hold_them(codec_and_value, num_cols):
    name, value = codec_and_value
    given = torch.full((2, num_cols), value)
    decoded, max_error = there_and_back(name, given)
    assert torch.equal(decoded, given)
    assert max_error == 0.0


@pytest.mark.parametrize("name", LOSSY_BITS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_integers_refuse_rows_with_nan_or_infinity(name, bad):
    given = torch.rand(40_000, 8)
    given[30_000, 3] = bad
    with pytest.raises(ValueError, match=rf"{name} cannot hold number 30000 .* codec 'exact'"):
        codec_named(name).encode(given)


@pytest.mark.parametrize(
    ("name", "row"), [("int8", [-3e38, 3e38]), ("int4", [0.0, 1e7]), ("int4", [1e5, 1e5])]
)
def test_integers_refuse_rows_beyond_scale_and_bias(name, row):
    with pytest.raises(ValueError, match="cannot hold number 1 "):
        codec_named(name).encode(torch.tensor([[0.0, 1.0], row]))


@pytest.mark.parametrize("name", CODECS)
def test_encoding_in_blocks_equals_encoding_row_by_row(name):
    """Blocks are invisible, and the error is that of the worst row wherever it is."""
    given = torch.randn(40_000, 7, generator=torch.Generator().manual_seed(0)) / 100
    given[35_000] *= 100
    decoded, max_error = there_and_back(name, given)
    for begin in (0, 18_720, 35_000, 39_999):
        alone, _ = there_and_back(name, given[begin : begin + 7])
        assert torch.equal(alone, decoded[begin : begin + 7])
    assert max_error == errors(given, decoded).max().item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CODECS)
def test_tables_of_any_float_dtype(name, dtype):
    given = torch.randn(50, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    decoded, max_error = there_and_back(name, given)
    assert max_error == errors(given, decoded).max().item()
    assert max_error < 0.5
    assert there_and_back(name, given[:0])[1] == 0.0, "no rows"
    if name == "exact" or (name == "fp32" and dtype != torch.float64):
        assert max_error == 0.0


def test_layout_of_quantised_rows_as_format_md_tells_it():
    given = torch.tensor([[-1.0, 0.5, 2.0]])
    row = codec_named("int8").encode(given)[0].numpy().tobytes()
    scale, bias = struct.unpack("<2f", row[3:])
    assert [bias + scale * code for code in row[:3]] == pytest.approx([-1.0, 0.5, 2.0], abs=0.006)
    row = codec_named("int4").encode(given)[0].numpy().tobytes()
    scale, bias = struct.unpack("<2e", row[2:])
    codes = [row[0] & 15, row[0] >> 4, row[1] & 15]
    assert [bias + scale * code for code in codes] == pytest.approx([-1.0, 0.5, 2.0], abs=0.11)
