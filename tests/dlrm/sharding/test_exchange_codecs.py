"""Errors and bytes of exchanged embeddings."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm.config.schema import TablesConfig
from dlrm.sharding.exchange_codecs import ExchangeCodecs, exchanged_width
from dlrm.sharding.plan import make_sharder

CODED = ["bf16", "fp16", "int8"]
ALL_TO_ALL = "POOLED_EMBEDDINGS_ALL_TO_ALL"
WIDTH = 16
BATCH = 1000


def ways(dtype, width=WIDTH):
    """Codecs of embeddings and of their gradients, and by how much the latter travel larger."""
    codecs = ExchangeCodecs(dtype=dtype, batch_size=BATCH)
    registry = codecs.registry(width)[ALL_TO_ALL]
    return (registry.forward, 1.0), (registry.backward, codecs.gradient_scale)


def round_trip(codec, numbers):
    context = codec.create_context()
    coded = codec.encode(numbers.view(-1), context)
    assert coded.dtype == codec.quantized_dtype
    assert coded.numel() == codec.calc_quantized_size(numbers.numel(), context)
    return codec.decode(coded, context).view(numbers.shape), coded.nbytes


def bound(dtype, numbers, scale):
    """As the module has it, and the last bits of fp32."""
    if dtype == "fp16":
        return (numbers.abs() * 2**-11).clamp(min=2**-25 / scale)
    if dtype == "bf16":
        return numbers.abs() * 2**-8
    low, high = numbers.aminmax(dim=1, keepdim=True)
    return ((high - low) / 510 + 1e-8 / scale + numbers.abs().amax(1, keepdim=True) * 2**-21).expand_as(
        numbers
    )


@pytest.mark.parametrize("dtype", CODED)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    magnitude=st.floats(-9, 1),
    spread=st.floats(0, 3),
    offset=st.sampled_from([0.0, 1.0]),
    num_rows=st.integers(0, 9),
    given=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_error_is_within_its_bound(dtype, seed, magnitude, spread, offset, num_rows, given):
    """Rows of any size, from what gradients of a mean are to more than embeddings are.

    Embeddings are bf16 under train.precision=bf16; what comes out is fp32.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (magnitude + spread * torch.randn(num_rows, 1, generator=generator))
    numbers = sizes.clamp(max=5) * (torch.randn(num_rows, WIDTH, generator=generator) + offset)
    numbers = numbers.to(given).float()
    for codec, scale in ways(dtype):
        found, _ = round_trip(codec, numbers.to(given))
        assert found.dtype == torch.float32
        assert (found - numbers).abs().le(bound(dtype, numbers, scale)).all()


@pytest.mark.parametrize(
    ("dtype", "width", "value_bytes"),
    [("fp16", 16, 2), ("bf16", 4, 2), ("int8", 16, 1.5), ("int8", 64, 1.125), ("int8", 12, 2)],
)
def test_bytes_of_an_exchanged_number(dtype, width, value_bytes):
    assert ExchangeCodecs(dtype=dtype, batch_size=BATCH).value_bytes(width) == value_bytes
    for codec, _ in ways(dtype, width):
        assert round_trip(codec, torch.randn(7, width))[1] == 7 * width * value_bytes


@pytest.mark.parametrize("dtype", CODED)
def test_nan_and_infinity_survive_the_exchange(dtype):
    numbers = torch.ones(4, WIDTH)
    numbers[1, 3] = torch.nan
    for codec, _ in ways(dtype):
        found, _ = round_trip(codec, numbers)
        assert found[1, 3].isnan()
        assert found[[0, 2, 3]].isfinite().all()
    numbers[2, 5], numbers[3, 6] = torch.inf, -torch.inf
    for codec, _ in ways(dtype):
        found, _ = round_trip(codec, numbers)
        if dtype == "int8":
            assert found[1:].isnan().all()
        else:
            assert found[2, 5] == -found[3, 6] == torch.inf
            assert found.isfinite().sum() == numbers.isfinite().sum()
        assert found[0].isfinite().all()


@pytest.mark.parametrize("beside", [1.0, torch.inf])
def test_numbers_too_large_for_fp16_are_clamped(beside):
    for codec, scale in ways("fp16"):
        found, _ = round_trip(codec, torch.tensor([[1e9, -1e9] + [beside] * (WIDTH - 2)]))
        assert found[0, 0] == -found[0, 1] == torch.finfo(torch.float16).max / scale


def test_narrow_pieces_travel_in_fp16_and_int8_is_not_summed():
    codecs = ExchangeCodecs(dtype="int8", batch_size=BATCH)
    assert [codecs.used(width) for width in (0, 4, 12, 16, 64)] == ["fp16"] * 3 + ["int8"] * 2
    assert set(codecs.registry(16)) == {ALL_TO_ALL}
    assert set(codecs.registry(4)) == {ALL_TO_ALL, "POOLED_EMBEDDINGS_REDUCE_SCATTER"}


def test_gradients_travel_larger_by_a_power_of_two():
    scales = [
        ExchangeCodecs(dtype="fp16", batch_size=batch).gradient_scale for batch in (1, 2, 1000, 1024, 1025)
    ]
    assert scales == [1, 2, 1024, 1024, 2048]
    assert ExchangeCodecs(dtype="bf16", batch_size=1000).gradient_scale == 1


def sharding(kind, *widths):
    shards = [SimpleNamespace(shard_sizes=[10, width]) for width in widths]
    spec = SimpleNamespace(shards=shards) if shards else None
    return SimpleNamespace(sharding_type=kind, sharding_spec=spec)


@pytest.mark.parametrize(
    ("plan", "width"),
    [
        ([sharding("table_wise", 16), sharding("data_parallel")], 16),
        ([sharding("table_wise", 40), sharding("column_wise", 16, 16, 8)], 8),
        ([sharding("row_wise", 64, 64), sharding("column_wise", 32, 32)], 32),
        ([sharding("data_parallel")], 0),
    ],
)
def test_the_width_divides_all_pieces(plan, width):
    assert exchanged_width(dict(enumerate(plan))) == width


def test_the_sharder_reports_exchanged_bytes_to_torchrecs_planner():
    """Which estimates times by the bytes of a number."""
    for dtype, found in ((None, None), ("bf16", torch.bfloat16), ("int8", torch.uint8)):
        codecs = dtype and ExchangeCodecs(dtype=dtype, batch_size=BATCH)
        registry = make_sharder(TablesConfig(), None, codecs).qcomm_codecs_registry
        assert (registry and registry[ALL_TO_ALL].forward.quantized_dtype) == found
