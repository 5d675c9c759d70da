"""Check that all ranks have the same configuration, because each node is started by its own command."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist

from dlrm.config.schema import Config

NODE_SETTINGS: Final = frozenset(
    {
        "data.uri",
        "data.cache_folder",
        "data.cache_disk_gb",
        "data.cache_memory_gb",
        "checkpoint.uri",
        "checkpoint.host_memory_mb",
        "train.run_folder",
    }
)
"""Paths and sizes that may differ between nodes."""


def check_agreed(config: Config) -> None:
    """Raise on all ranks unless all have the same configuration; a collective.

    Raises:
        ValueError: names the keys that differ.
    """
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, _settings(config))
    check_settings(of_ranks)


def check_settings(of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the settings of the ranks, values by key, differ."""
    for rank, settings in enumerate(of_ranks):
        differing = [name for name, value in settings.items() if value != of_ranks[0].get(name)]
        if differing:
            other, first = (
                ", ".join(f"{name}={each.get(name)}" for name in differing)
                for each in (settings, of_ranks[0])
            )
            raise ValueError(
                f"rank {rank} was started with {other}, and rank 0 with {first}: give all nodes the same "
                "recipe and the same --set"
            )


def _settings(config: Config) -> dict[str, Any]:
    """Values by key, without `NODE_SETTINGS`."""
    settings = {
        f"{section}.{name}": value
        for section, options in config.to_dict().items()
        for name, value in options.items()
    }
    return {name: value for name, value in settings.items() if name not in NODE_SETTINGS}
