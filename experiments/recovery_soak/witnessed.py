"""`PartialRecovery` for the workers of the soak, with every recovery checked against independent logs."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cpr.recovery.run.report import Recovery
from cpr.session import PartialRecovery
from cpr.shards import find_shards
from experiments.recovery_soak.verdict import Claim, check_recovery
from experiments.recovery_soak.witness import History, Writer

FOLDER: Final = "CPR_WITNESS"
"""Environment variable: where the logs are."""
CHECKS: Final = "checks.jsonl"
"""File in that folder with a JSON line for each worker and recovery."""


class WitnessedRecovery(PartialRecovery):
    """Checks all rows after each recovery, and logs them after each step."""

    _writer: Writer | None = None

    def restore(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *others: Any,
        **named: Any,
    ) -> Recovery:
        """See `PartialRecovery.restore`."""
        recovered = super().restore(model, optimizers, *others, **named)
        folder = Path(os.environ[FOLDER])
        shards = find_shards(model, optimizers)
        claim = Claim(
            kind=recovered.kind,
            step=recovered.step,
            save_step=recovered.save_step,
            mirror_step=recovered.mirror_step,
            interrupted=recovered.interrupted,
            lost={origin.table_fqn: origin.lost for origin in recovered.sources},
            mirrored={origin.table_fqn: origin.mirrored for origin in recovered.sources},
        )
        counts = check_recovery(History(folder), claim, shards)
        line = {
            "generation": recovered.generation,
            "rank": self.worker_group.rank,
            "kind": recovered.kind,
            "step": recovered.step,
            "save_step": recovered.save_step,
            **asdict(counts),
        }
        with (folder / CHECKS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        dist.barrier()  # all have read the logs of those before them
        writer = self._writer = Writer(folder, self.steps_done, shards)

        def note_batch(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            if module.training:
                features = arguments[1].to_dict()
                writer.batch(
                    self.steps_done + 1, {name: part.values().numpy() for name, part in features.items()}
                )

        model.register_forward_pre_hook(note_batch)
        return recovered

    def step(self, samples: int) -> None:
        """See `PartialRecovery.step`; the log is first, so that it has every step that is resumed from."""
        assert self._writer is not None
        self._writer.rows(self.steps_done + 1)
        super().step(samples)
