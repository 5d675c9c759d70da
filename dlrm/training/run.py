"""Runs training from a configuration to the printed report.

Importing this module takes seconds (torch, torchrec).
"""

from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from dlrm.config.ranks_agree import check_agreed
from dlrm.config.schema import Config
from dlrm.fault_tolerance.setup import RecoverySetup, open_recovery
from dlrm.launch.device import Ranks, resolve_device
from dlrm.launch.malloc import keep_freed_memory
from dlrm.launch.process import quiet_libraries
from dlrm.launch.stop_signal import StopSignal
from dlrm.launch.versions import check_versions
from dlrm.telemetry.report import Report, format_report
from dlrm.training.build import build, start_process_group
from dlrm.training.data import Inputs, prepare


def run(config: Config, recipe: str, stop: StopSignal, resume: Path | None = None) -> None:
    """Build, train, and clean up in any case; rank 0 prints the report.

    Raises:
        ValueError: a mistake of the user; says what to change.
        StopRequested: a signal stopped the run.
    """
    keep_freed_memory()
    recovery = open_recovery(config, resume)
    with recovery or nullcontext():
        if recovery is not None:
            # restarted workers get their old rank back here, which the loaders need
            device = resolve_device(config.train.device, Ranks.from_environment())
            recovery.join(device)
            quiet_libraries()
        inputs = prepare(config, recipe, Ranks.from_environment(), resume)
        try:
            check_versions(inputs.device.type)  # train.device=auto is resolved only now
            if recovery is None:
                start_process_group(inputs.ranks, inputs.device)
            check_agreed(config)
            report = _train(inputs, stop, recovery)
        finally:
            inputs.close()
    dist.destroy_process_group()
    if report is not None:
        print(f"\n{format_report(report)}", flush=True)


def _train(inputs: Inputs, stop: StopSignal, recovery: RecoverySetup | None) -> Report | None:
    trainer = build(inputs, stop, recovery)
    try:
        trainer.train()
        return trainer.telemetry.finish(trainer.session.failures, trainer.replicas.losses)
    finally:
        trainer.replicas.close()
        trainer.session.close()
        trainer.telemetry.close()
