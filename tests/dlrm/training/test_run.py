"""Ranks that were started with different configurations are refused."""

from dataclasses import replace

import pytest

from dlrm.config.schema import CommConfig, Config, DataConfig, DenseConfig
from dlrm.training.run import NODE_SETTINGS, _settings, check_agreed, check_settings


def test_differing_settings_are_named_with_both_values():
    other = replace(Config(), comm=CommConfig(exchange="ring"), dense=DenseConfig(learning_rate=0.5))
    told = [_settings(Config())] * 2 + [_settings(other)]
    with pytest.raises(ValueError, match=r"rank 2 .* dense.learning_rate=0.5, comm.exchange=ring, and"):
        check_settings(told)


def test_paths_may_differ_between_nodes():
    other = replace(Config(), data=DataConfig(uri="/mnt/criteo", cache_folder="/tmp/cache"))
    check_settings([_settings(Config()), _settings(other)])
    names = {f"{section}.{name}" for section, options in Config().to_dict().items() for name in options}
    assert names >= NODE_SETTINGS


def test_one_rank_agrees_with_itself(world_of_one):
    check_agreed(Config())
