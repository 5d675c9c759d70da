"""How long ranks wait for each other in groups that are made beside the one that somebody was given."""

from datetime import timedelta

import torch
import torch.distributed as dist


def timeout_of(device: torch.device, group: dist.ProcessGroup | None = None) -> timedelta | None:
    """What a group was made with, for `dist.new_group`, which would take half an hour otherwise.

    Args:
        device: on which the group exchanges tensors.
        group: None is all ranks.

    Returns:
        None: its backend does not tell.
    """
    group = group or dist.group.WORLD
    options = getattr(group and group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
