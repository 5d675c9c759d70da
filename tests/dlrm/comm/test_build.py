"""Exchanges that are built from configurations."""

import pytest
import torch

from dlrm.comm.build import Collectives, _candidates, _warn_of_one_node
from dlrm.comm.collectives.levels import Nodes
from dlrm.comm.compression.compressors import MSTopK
from dlrm.comm.config import CODECS, DENSE, PLAIN, SPARSE, CommConfig

CPU = torch.device("cpu")


def names(**options):
    config = CommConfig(exchange="auto", **options)
    make = Collectives(config.codec, True, CPU, None)
    return [each.name for each in _candidates(config, make, MSTopK(), 1000)]


def test_auto_tries_encodings_unless_one_is_configured(world_of_one):
    ways = ["ring", "tree", "sparse all-gather", "AR-Topk STAR, ring", "AR-Topk STAR, tree"]
    assert names() == [*(f"{way} fp32" for way in ways), "ring bf16", "ring int8"]
    assert names(wire_dtype="fp32") == [f"{way} fp32" for way in ways]
    # something lossless is always there to compare with
    assert names(wire_dtype="int8") == [*(f"{way} int8" for way in ways), "ring fp32"]


@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 4), (2, 2), (4, 1)])
def test_two_levels_on_one_node_cause_a_warning(num_nodes, per_node, caplog):
    nodes = Nodes(group=None, inside=None, between=None, per_node=per_node, num_nodes=num_nodes)
    _warn_of_one_node("hi_topk", nodes)
    assert ("these 4 ranks count as one node: all values are sent" in caplog.text) == (num_nodes == 1)


@pytest.mark.parametrize("exchange", [name for name in (*DENSE, *SPARSE) if name not in PLAIN])
@pytest.mark.parametrize("codec", CODECS)
def test_values_are_encoded_as_configured_and_in_fp32_by_default(exchange, codec, world_of_one):
    config = CommConfig(exchange=exchange, wire_dtype=codec)
    made = Collectives(config.codec, True, CPU, None)(exchange)
    assert made.name.endswith(codec)
    assert CommConfig(exchange=exchange).codec == "fp32"
