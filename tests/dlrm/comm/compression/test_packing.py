import pytest
import torch

from dlrm.comm.compression.codecs import Half, Plain, WireInt8
from dlrm.comm.compression.packing import CHUNK, Packing

CODECS = [Plain(), Half(torch.float16), Half(torch.bfloat16), WireInt8()]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("length", [0, 1, 1027, CHUNK + 5])
def test_message_and_rounding_errors_add_up(codec, length):
    packing = Packing(codec)
    values = torch.randn(length)
    before = values.clone()
    data = torch.zeros(packing.aligned_bytes(length) + 4, dtype=torch.uint8)
    packing.pack(values, data[: packing.num_bytes(length)])
    assert not data[packing.num_bytes(length) :].any()
    sent = torch.empty(length)
    packing.unpack(data[: packing.num_bytes(length)], sent)
    torch.testing.assert_close(sent + values, before, rtol=1e-6, atol=1e-7)
    if packing.is_lossless or length > 1000:
        assert packing.is_lossless == (not values.any())
    packing.add(data[: packing.num_bytes(length)], sent)
    torch.testing.assert_close(sent + 2 * values, 2 * before, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_sent_and_not_kept(codec, wrong):
    packing = Packing(codec)
    values = torch.ones(10)
    values[3] = wrong
    data = torch.empty(packing.num_bytes(10), dtype=torch.uint8)
    packing.pack(values, data)
    assert values.isfinite().all()
    packing.unpack(data, values)
    assert not values[3].isfinite()
