"""A new run that begins with what another one has learned, on data of its own: the day after."""

import logging

import torch.distributed as dist

from cpr.checkpoint.checkpointer import Checkpointer
from dlrm.optim.build import Optimizers
from dlrm.training.data import Inputs

logger = logging.getLogger(__name__)


def warm_start(inputs: Inputs, optimizers: Optimizers, checkpointer: Checkpointer) -> None:
    """Load the model that `train.warm_start` names, if it names one, where a run begins; all ranks together.

    Tables (ids of dynamic ones included), dense parameters and the state of optimizers are those of the
    newest save there, and the learning rates' schedule goes on. Data, steps, figures and random generators
    begin anew. Gradients that ranks had not sent yet (`comm.exchange`) stay behind.

    Args:
        inputs: of the run that begins.
        optimizers: of it; registered with the checkpointer.
        checkpointer: of it; nothing is saved or loaded yet.

    Raises:
        ValueError: the other run has another optimizer, or its schedule has come to its end.
        CheckpointError: nothing is saved there, or nothing of this model.
    """
    config = inputs.config
    if not config.train.warm_start:
        return
    state = checkpointer.warm_start(config.train.warm_start, ["optimizers"])
    factor = optimizers.go_on_after(state.step)
    if dist.get_rank() == 0:
        days = ", ".join(map(str, inputs.loader.manifest.days))
        logger.info(
            "warm start: model, optimizers and schedule (learning rates times %g) go on from save %d, step "
            "%d, of %s; the data begins anew, with day %s of %s",
            factor,
            state.sequence,
            state.step,
            config.train.warm_start,
            days,
            config.data.uri,
        )
