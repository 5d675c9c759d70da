"""Makes the schedule of a run."""

import torch.distributed as dist
from torch import nn

from dlrm.config.schema import TrainConfig
from dlrm.pipeline.schedules import Fastest, Plain, Prefetch, PrefetchIds, Schedule, Waves
from dlrm.pipeline.tick_tock import TickTock


def make_schedule(config: TrainConfig, model: nn.Module) -> Schedule:
    """Make the schedule that `train.pipeline` names.

    Raises:
        ValueError: it does not suit the model.
    """
    if config.has_two_replicas:
        return TickTock(model)
    if config.pipeline == "waves":
        return Waves(model)
    if config.pipeline == "none" or dist.get_world_size() == 1:
        return Plain(model)
    if config.pipeline == "auto":
        return Fastest(model)
    if config.pipeline == "ids":
        return PrefetchIds(model)
    return Prefetch(model, config.late_rows if config.is_late else "corrected")
