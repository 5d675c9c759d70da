"""Warm start: a new run that starts from another run's model and trains on data of its own."""

import logging

import torch.distributed as dist

from cpr.checkpoint.checkpointer import Checkpointer
from dlrm.optim.build import Optimizers
from dlrm.training.data import Inputs

logger = logging.getLogger(__name__)


def warm_start(inputs: Inputs, optimizers: Optimizers, checkpointer: Checkpointer) -> None:
    """Load the model that `train.warm_start` names, if any; a collective, before the first save or load.

    Loads tables (with ids of dynamic ones), dense parameters, optimizer states and the position in the
    learning-rate schedule from the newest save there. Data, steps, metrics and random generators start over.
    Gradients that ranks had not sent yet (`comm.exchange`) are dropped.

    Raises:
        ValueError: the other run has another optimizer, or its schedule has ended.
        CheckpointError: nothing is saved there, or nothing of this model.
    """
    config = inputs.config
    if not config.train.warm_start:
        return
    state = checkpointer.warm_start(config.train.warm_start, ["optimizers"])
    factor = optimizers.continue_schedule(state.step)
    if dist.get_rank() == 0:
        days = ", ".join(map(str, inputs.loader.manifest.days))
        logger.info(
            "warm start: model, optimizers and schedule (learning rates times %g) continue from save %d, "
            "step %d, of %s; the data starts over, with day %s of %s",
            factor,
            state.sequence,
            state.step,
            config.train.warm_start,
            days,
            config.data.uri,
        )
