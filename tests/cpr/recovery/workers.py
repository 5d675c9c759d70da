"""Workers in a world of one, one after the other in one process: killed, wiped, restarted."""

from dataclasses import replace

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import cpr
from cpr.checkpoint.ownership.records import write_owner
from tests.cpr.checkpoint.runs import assert_same
from tests.cpr.shards import models

ROWS = {"a": 100, "b": 40, "c": 20}
LAYOUT = {"a": "tw", "b": "cw", "c": "dp"}
BATCH = 8

__all__ = ["Worker", "assert_same"]


class Position:
    """A data loader's position, as a registered state."""

    def __init__(self):
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Worker:
    """A worker that trains a small model with `PartialRecovery`."""

    def __init__(
        self,
        folder,
        memory,
        *,
        layout=None,
        rows=None,
        sequences=None,
        fused=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        optimizer=torch.optim.Adagrad,
        apart=False,
        before_save=None,
        **options,
    ):
        self.rows = rows or ROWS
        self.sequences = sequences or {}
        self.before_save = before_save
        self.recovery = cpr.PartialRecovery(str(folder), resident_root=str(memory), **options)
        self.recovery.init_process_group("gloo")
        self.trained = []
        torch.manual_seed(7)
        with self.recovery.building():
            collections = {"seq": models.sequences(**self.sequences)} if sequences else {}
            collections["ebc"] = models.bags(**self.rows)
            self.model = models.shard(layout or LAYOUT, fused, **collections)
        self.position = Position()
        self.optimizers = self._make_optimizers(optimizer, apart)

    def _make_optimizers(self, kind, apart):
        """For all that is not fused; or, apart, for the dense part and for data-parallel tables."""
        parameters = [p for p in self.model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        dense = list(self.model.module.dense.parameters())
        tables = [p for p in parameters if p.numel() and not any(p is each for each in dense)]
        groups = [dense, tables] if apart else [dense + tables]
        return [kind(group, lr=0.1) for group in groups if group]

    def restore(self, initialize=None, **options):
        self.story = self.recovery.restore(
            self.model,
            optimizers=self.optimizers,
            states={"position": self.position},
            before_save=self.before_save,
            initialize=initialize,
            **options,
        )
        self.position.next += self.recovery.batches_to_skip
        return self

    def forward_backward(self):
        features = {"ebc": models.batch(self.position.next, BATCH, **self.rows)}
        if self.sequences:
            features["seq"] = models.batch(self.position.next, BATCH, **self.sequences)
        self.trained.append(self.position.next)
        self.position.next += 1
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(features).square().mean().backward()

    def train(self, steps):
        for _ in range(steps):
            self.forward_backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.recovery.step(samples=BATCH)
        return self

    def wait_for_save(self):
        self.recovery.checkpointer.wait()
        return self

    def values(self):
        """Copies of all that must come back."""
        tables = {
            f"{shard.name}/{name}": column.detach().clone()
            for shard in self.recovery.checkpointer.shards
            for name, column in {**shard.columns, **shard.counters}.items()
        }
        dense = {name: value.detach().clone() for name, value in self.model.module.dense.state_dict().items()}
        return {**tables, **dense, "next": torch.tensor(self.position.next)}

    def die(self, reason=None):
        """As if killed by -9, or, with a reason, by an exception; what the kernel does then is done here."""
        if reason is not None:
            self.recovery.__exit__(type(reason), reason, None)
        elif self.recovery._publisher is not None:
            self.recovery._publisher.close()  # hooks and threads die with a process
        recovery = self.recovery
        mirror = recovery._mirror
        if mirror is not None:
            mirror.close(remove=False)
        checkpointer = recovery._checkpointer
        if checkpointer is not None and reason is None:
            lock, checkpointer.ownership.lock = checkpointer.ownership.lock, None
            checkpointer.close(abandon=True)
            if lock is not None and lock._thread is not None:
                lock._released.set()
                lock._thread.join()
                self._forge_death(lock)
        segments = [each.segment for each in recovery._memory.claimed]
        if recovery._memory.segment is not None:
            segments.append(recovery._memory.segment)
        if mirror is not None and mirror._keeper._copy is not None:
            segments.append(mirror._keeper._copy.segment)
        for segment in segments:
            segment.release()
        dist.destroy_process_group()

    def _forge_death(self, lock):
        """This process lives on; the lock must not say so."""
        write_owner(lock._storage, replace(lock._own, started=1))
