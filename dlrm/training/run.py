"""Runs training from a configuration, which all ranks must share, to the printed report.

Importing this module takes seconds (torch, torchrec).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from cpr import Changes
from cpr.errors import CheckpointError
from cpr.versions import check_versions
from dlrm.config.schema import Config
from dlrm.fault_tolerance.setup import open_recovery
from dlrm.launch.device import Ranks, resolve_device
from dlrm.launch.malloc import keep_freed_memory
from dlrm.launch.process import FAILURES, MISTAKES, quiet_libraries
from dlrm.launch.stop_signal import StopRequested, StopSignal
from dlrm.telemetry.report import Report, format_report
from dlrm.training.build import build, end_process_group, start_process_group
from dlrm.training.data import Inputs, prepare
from dlrm.training.model import check_own_model
from dlrm.training.trainer import Trainer

logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
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


def run(
    config: Config, recipe: str, stop: StopSignal, resume: Path | None = None, allowed: Sequence[str] = ()
) -> None:
    """Build, train, and clean up in any case; rank 0 prints the report.

    `allowed` says how the model may differ from what it loads, see `cpr.Changes.of`.

    Raises:
        ValueError: a mistake of the user; says what to change.
        StopRequested: a signal stopped the run.
    """
    keep_freed_memory()
    report = _run(config, recipe, stop, resume, Changes.of(*allowed))
    end_process_group()
    if report is not None:
        print(f"\n{format_report(report)}", flush=True)


def _run(
    config: Config, recipe: str, stop: StopSignal, resume: Path | None, changes: Changes
) -> Report | None:
    """Build and train; what refers to the process group is gone when this returns."""
    recovery = open_recovery(config, resume)
    with recovery or nullcontext():
        if recovery is not None:
            # restarted workers get their old rank back here, which the loaders need
            device = resolve_device(config.train.device, Ranks.from_environment())
            recovery.join(device)
            quiet_libraries()
        continues = recovery is not None and recovery.continues
        open_inputs = partial(prepare, config, recipe, Ranks.from_environment(), resume, changes)
        inputs = _tried_again(open_inputs) if continues else open_inputs()
        try:
            if not continues:
                check_own_model(inputs)
            check_versions(inputs.device.type)  # train.device=auto is resolved only now
            if recovery is None:
                start_process_group(inputs.ranks, inputs.device)
            check_agreed(config)
            return _train(build(inputs, stop, recovery))
        finally:
            inputs.close()


def _tried_again(open_inputs: Callable[[], Inputs]) -> Inputs:
    """Open the inputs of restarted workers, which wait for a stream that cannot be reached."""
    while True:
        try:
            return open_inputs()
        except ConnectionError as error:
            logger.warning("restarted workers try again, as they trained before: %s", error)
            time.sleep(RETRY_S)


def _train(trainer: Trainer) -> Report | None:
    try:
        return _train_and_close(trainer)
    except (*MISTAKES, CheckpointError):
        trainer.telemetry.discard_unbegun()  # e.g. a warm start that does not fit
        raise


def _train_and_close(trainer: Trainer) -> Report | None:
    is_over = True
    try:
        trainer.train()
        failures, losses = trainer.session.failures, trainer.replicas.losses
        return trainer.telemetry.finish(failures, losses, trainer.selection.report)
    except BaseException as error:
        trainer.telemetry.failed(error)
        # after other errors, such as a lost peer, workers are started again, and must not wait for the page
        is_over = isinstance(error, (*MISTAKES, *FAILURES, StopRequested)) or not trainer.session.history
        raise
    finally:
        trainer.replicas.close()
        trainer.session.close()
        trainer.telemetry.close()
        if is_over:
            trainer.telemetry.write_page(trainer.session.history)


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
    """Flatten a configuration to values by key, without the `NODE_SETTINGS` that may differ by node."""
    settings = {
        f"{section}.{name}": value
        for section, options in config.to_dict().items()
        for name, value in options.items()
    }
    return {name: value for name, value in settings.items() if name not in NODE_SETTINGS}
