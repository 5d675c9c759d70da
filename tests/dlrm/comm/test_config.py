"""Options that an exchange would not read are refused."""

import pytest

from dlrm.comm.config import EXCHANGES, SPARSE, CommConfig


def test_every_exchange_has_valid_defaults():
    for exchange in EXCHANGES:
        assert CommConfig(exchange=exchange).is_sparse == (exchange in {*SPARSE, "auto"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exchange": "gossip"}, "comm.exchange is 'gossip'; choose one of dense, ring"),
        ({"compressor": "zip"}, "comm.compressor is 'zip'; choose one of mstopk"),
        ({"wire_dtype": "fp8"}, "comm.wire_dtype is 'fp8'; choose one of fp32"),
        ({"controller": "pid"}, "comm.controller is 'pid'; choose one of fixed, gravac"),
        ({"ratio": 0}, "comm.ratio is a share"),
        ({"ratio": 1.5}, "comm.ratio is a share"),
        ({"min_gain": 0}, "comm.min_gain is a share"),
        ({"window_steps": 0}, "comm.window_steps must be positive"),
        ({"sync_change": -1}, "comm.sync_change must not be negative"),
        ({"threshold": float("nan")}, "comm.threshold must be finite"),
        ({"exchange": "star", "threshold": 0.1}, "comm.compressor=threshold go together"),
        ({"exchange": "star", "compressor": "threshold"}, "comm.compressor=threshold go together"),
        (
            {"exchange": "star", "compressor": "threshold", "threshold": 0.1, "controller": "gravac"},
            "leave comm.controller at fixed",
        ),
        (
            {"exchange": "star", "compressor": "threshold", "threshold": 0.1, "ratio": 1},
            "comm.ratio below 1",
        ),
        (
            {"wire_dtype": "fp16"},
            "comm.exchange=dense is fp32; for comm.wire_dtype=fp16 set comm.exchange to ring",
        ),
        (
            {"exchange": "auto", "controller": "gravac"},
            "comm.exchange=auto compares ways to send the same share of values, and comm.controller=gravac",
        ),
        ({"exchange": "selsync", "wire_dtype": "int8"}, "comm.exchange=selsync is fp32"),
        ({"exchange": "ring", "compressor": "topk"}, "comm.exchange=ring sends all values"),
        ({"exchange": "tree", "controller": "pareto"}, "comm.exchange=tree sends all values"),
        ({"error_feedback": False}, "comm.exchange=dense keeps no residual"),
        ({"ratio": 0.1}, "comm.exchange is dense.*set comm.exchange to auto, all_gather"),
        ({"exchange": "ring", "ratio": 0.1}, "comm.exchange is ring"),
        ({"exchange": "star", "controller": "pareto", "ratio": 0.1}, "comm.controller pareto"),
        ({"exchange": "star", "min_gain": 0.9}, "comm.controller=gravac or .* it is fixed"),
        ({"exchange": "star", "controller": "pareto", "window_steps": 9}, "it is pareto"),
        ({"exchange": "ring", "sync_change": 0.0}, "comm.exchange=selsync, and it is ring"),
    ],
)
def test_invalid_and_unread_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CommConfig(**options)
