"""Codecs keep their length and error bounds, and their treatment of values out of range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.comm.compression.wire_codecs import BLOCK, CHUNK, Cast, WireInt8

NAN, INF = float("nan"), float("inf")
CODECS = {
    "fp32": Cast(torch.float32),
    "fp16": Cast(torch.float16),
    "bf16": Cast(torch.bfloat16),
    "int8": WireInt8(),
}
FLOATS = st.floats(width=32, allow_nan=False, min_value=-(2.0**120), max_value=2.0**120)
SIZES = st.sampled_from([0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5])


def there_and_back(codec, values):
    return codec.decode(codec.encode(values), values.numel())


def allowed_error(name, values):
    """The error bounds of the docstrings."""
    size = values.abs().double()
    match name:
        case "fp32":
            return torch.zeros_like(size)
        case "fp16":
            return torch.maximum(size * 2**-11, torch.tensor(2.0**-25))
        case "bf16":
            return torch.maximum(size * 2**-8, torch.tensor(2.0**-134))
        case _:
            blocks = torch.nn.functional.pad(size, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
            largest = blocks.amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: values.numel()]
            # the division and the product round once each
            return torch.maximum(largest / 254 * (1 + 2**-15), torch.tensor(2.0**-126))


def of_unequal_scale(size, exponent, seed):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    values[: size // 2] *= 1e-6
    return values


VECTORS = st.one_of(
    st.lists(FLOATS, max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32)),
    st.builds(of_unequal_scale, SIZES, st.integers(-40, 30), st.integers(0, 9)),
)


@pytest.mark.parametrize("name", CODECS)
@given(values=VECTORS, offset=st.integers(0, 4))
def test_errors_are_within_bounds_at_any_offset_of_a_message(name, values, offset):
    codec, size = CODECS[name], values.numel()
    data = codec.encode(values)
    assert data.dtype is torch.uint8
    assert data.shape == (codec.num_bytes(size),)
    assert torch.equal(codec.encode(values), data)
    larger = torch.zeros(offset + data.numel() + 5, dtype=torch.uint8)
    inside = larger[offset : offset + data.numel()]
    inside.copy_(data)
    decoded = codec.decode(inside, size)
    assert torch.equal(inside, data)
    assert decoded.dtype is torch.float32
    assert decoded.shape == (size,)
    finite = values.abs() <= 65504 if name == "fp16" else torch.ones_like(values, dtype=torch.bool)
    error = (decoded.double() - values.double()).abs()
    assert (error <= allowed_error(name, values))[finite].all()
    assert (decoded == values.sign() * 65504)[~finite].all()
    if name != "int8":
        assert torch.equal(there_and_back(codec, decoded), decoded)


def test_message_lengths():
    assert [codec.num_bytes(2049) for codec in CODECS.values()] == [4 * 2049, 2 * 2049, 2 * 2049, 2049 + 12]


def test_values_beyond_the_largest_saturate_and_infinities_do_not():
    values = torch.tensor([65504.0, 65520.0, 1e30, -1e6, INF, -INF, NAN])
    found = there_and_back(CODECS["fp16"], values)
    wanted = torch.tensor([65504.0, 65504.0, 65504.0, -65504.0, INF, -INF, NAN])
    assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))
    assert found[-1].isnan()
    largest = torch.finfo(torch.float32).max
    assert there_and_back(CODECS["bf16"], torch.tensor([largest])).isfinite().all()


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_int8_makes_nan_of_a_block_with_nan_or_infinity(broken):
    values = torch.ones(2 * BLOCK + 3)
    values[BLOCK + 1] = broken
    found = there_and_back(WireInt8(), values)
    assert found[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(found[:BLOCK], values[:BLOCK])
    assert torch.equal(found[2 * BLOCK :], values[2 * BLOCK :])


def test_int8_rounds_ties_to_even_and_keeps_the_largest():
    # the scale is 1, so that levels are the values
    values = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert there_and_back(WireInt8(), values).tolist() == [127.0, -127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("length", [0, 1, 1027, CHUNK + 5])
def test_message_and_rounding_errors_add_up(codec, length):
    values = torch.randn(length)
    before = values.clone()
    data = torch.zeros(codec.num_bytes(length) + 4, dtype=torch.uint8)
    codec.pack(values, data[: codec.num_bytes(length)])
    assert not data[codec.num_bytes(length) :].any()
    sent = torch.empty(length)
    codec.unpack(data[: codec.num_bytes(length)], sent)
    torch.testing.assert_close(sent + values, before, rtol=1e-6, atol=1e-7)
    if codec.is_lossless or length > 1000:
        assert codec.is_lossless == (not values.any())
    codec.add(data[: codec.num_bytes(length)], sent)
    torch.testing.assert_close(sent + 2 * values, 2 * before, rtol=1e-6, atol=1e-7)
