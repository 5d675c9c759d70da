"""Ranks that were started with different commands."""

from dataclasses import replace

import pytest

from dlrm.config.ranks_agree import NODE_SETTINGS, _settings, check_agreed, check_settings
from dlrm.config.schema import CommConfig, Config, DataConfig, DenseConfig


def test_what_differs_is_named_with_both_values():
    other = replace(Config(), comm=CommConfig(exchange="ring"), dense=DenseConfig(learning_rate=0.5))
    told = [_settings(Config())] * 2 + [_settings(other)]
    with pytest.raises(ValueError, match=r"rank 2 .* dense.learning_rate=0.5, comm.exchange=ring, and"):
        check_settings(told)


def test_where_a_node_has_its_data_is_its_own_affair():
    other = replace(Config(), data=DataConfig(uri="/mnt/criteo", cache_folder="/tmp/cache"))
    check_settings([_settings(Config()), _settings(other)])


def test_all_that_may_differ_is_an_option():
    names = {f"{section}.{name}" for section, options in Config().to_dict().items() for name in options}
    assert names >= NODE_SETTINGS


def test_a_rank_alone_agrees(world_of_one):
    check_agreed(Config())
