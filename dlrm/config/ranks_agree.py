"""Whether all ranks were started alike: on each node, somebody has typed a command."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist

from dlrm.config.schema import Config

OF_A_NODE: Final = frozenset(
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
"""Where things are, and how much room there is: that may differ."""


def check_agreed(config: Config) -> None:
    """Refuse to train unless all ranks have the same configuration; they call it together.

    Raises:
        ValueError: on all ranks; names what differs.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, _settings(config))
    check_settings(told)


def check_settings(told: Sequence[Mapping[str, Any]]) -> None:
    """As `check_agreed`, of what each rank has told: values by option."""
    for rank, settings in enumerate(told):
        differing = [name for name, value in settings.items() if value != told[0].get(name)]
        if differing:
            theirs, first = (
                ", ".join(f"{name}={each.get(name)}" for name in differing) for each in (settings, told[0])
            )
            raise ValueError(
                f"rank {rank} was started with {theirs}, and rank 0 with {first}: give all nodes the same "
                "recipe and the same --set"
            )


def _settings(config: Config) -> dict[str, Any]:
    """Values by option, but for those that are a node's own."""
    settings = {
        f"{section}.{name}": value
        for section, options in config.to_dict().items()
        for name, value in options.items()
    }
    return {name: value for name, value in settings.items() if name not in OF_A_NODE}
