"""Trains a little, fails as it is told, and writes down what every worker has before and after.

`main(FOLDER, SCENARIO)` is run by workers under torchrun. In the first generation, all save after step 10, go
on to step 12 and fail there; later ones write down what they begin with, train three steps and end.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import cpr
import cpr.mirror.mirror as mirroring
from cpr.recovery.restore import restorer as restoring
from cpr.recovery.restore import transfer as moving
from dlrm.comm.build import build_exchange
from dlrm.comm.config import CommConfig
from tests.cpr.shards.models import bags, batch, shard

ROWS = {"a": 40, "b": 33, "c": 21, "d": 50, "e": 60}
LAYOUT = {"a": "tw_last", "b": "cw", "c": "dp", "d": "rw", "e": "tw"}
BATCH = 8
BASE_AT, SAVE_AT, FAIL_AT, MORE = 5, 10, 12, 3
NUM_OWED = 30
"""Values of gradients that are exchanged, and of which most are owed."""
PRIORITY = cpr.PriorityConfig(scheme="mfu", ratio=0.25, covering=0.85)  # all tables but c, the smallest


def values(recovery, model, exchange=None):
    """All that is to come back, with where it lies; of an exchange, what this rank owes."""
    shards = [
        {
            "table": each.table_fqn,
            "at": (each.row_offset, each.col_offset),
            "replicated": each.replicated,
            "columns": {name: column.clone() for name, column in each.columns.items()},
        }
        for each in recovery.checkpointer.shards
    ]
    dense = {name: value.clone() for name, value in model.module.dense.state_dict().items()}
    found = {"shards": shards, "dense": dense, "samples": recovery.samples_done}
    if exchange is not None:
        memory = exchange.residual.state_dict()["memory"]
        found["owed"] = memory.get("residual", torch.zeros(NUM_OWED)).clone()
    return found


def kill_oneself():
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_mirror(recovery):
    """Until the newest step is in the mirror, whose first moments are skipped while it is filled."""
    while recovery._mirror.step_sent != recovery.steps_done:
        if recovery._mirror._job is None:
            step_mirror(recovery)
        time.sleep(0.01)


def step_mirror(recovery):
    publisher, epoch = recovery._publisher, recovery.checkpointer.ownership.epoch
    recovery._mirror.step(recovery.steps_done, epoch, publisher.mirrored_state())


def fail(scenario, recovery, rank):
    dist.barrier()
    if (scenario.startswith("lose") or "mirror" in scenario) and rank == 1:
        shutil.rmtree(recovery._memory.segment.folder)
        kill_oneself()
    if scenario.startswith("resize"):
        raise RuntimeError("the launcher is about to change its mind")
    dist.barrier()  # the others find out here


def main(folder, scenario):
    folder = Path(folder)
    torch.set_num_threads(1)
    moving.MESSAGE_BYTES = 256  # some rows
    mirroring.keepers = lambda infos: [[1], [0]] if len(infos) == 2 else None  # each stands for a node
    if scenario == "lose_mirror_old":
        mirroring.can_undo = lambda *_: False  # as if survivors were too many steps ahead
    by_priority = scenario == "lose_by_priority"
    recovery = cpr.PartialRecovery(
        str(folder / "checkpoint"),
        save_every_steps=20 if by_priority else 5,  # so that a save is due every 5 steps
        priority=PRIORITY if by_priority else None,
        moment="consistent",
        total_samples=1000 * BATCH,
        mirror=cpr.MirrorConfig(to="neighbour" if "mirror" in scenario else "none"),
    )
    with recovery:
        recovery.init_process_group("gloo")
        rank, generation = dist.get_rank(), recovery.worker_group.generation
        torch.manual_seed(5)
        with recovery.building():
            model = shard(LAYOUT, ebc=bags(**ROWS))
        ordinary = [p for p in model.parameters() if p.numel() and not hasattr(p, "_in_backward_optimizers")]
        optimizer = torch.optim.Adagrad(ordinary, lr=0.1)
        if scenario in {"lose_again", "lose_mirrored_again"} and generation == 1 and rank == 0:
            restoring.RowTransfer.move = lambda *_: kill_oneself()  # in the middle of it
        if scenario in {"lose_before_seal", "lose_after_seal"} and generation == 1 and rank == 1:
            seal = restoring.Segment.seal

            def last_act(segment, **told):
                if scenario == "lose_after_seal":
                    seal(segment, **told)
                kill_oneself()

            restoring.Segment.seal = last_act  # when all have noted what this recovery cost
        # energies of residuals are known from the second step on
        exchange = build_exchange(CommConfig(exchange="all_gather", ratio=0.1), NUM_OWED, torch.device("cpu"))
        story = recovery.restore(
            model,
            optimizers=[optimizer],
            states={"exchange": exchange},
            per_rank_states={"owed": exchange.residual},
        )
        exchange.settle()
        (folder / f"losses-{generation}-{rank}.txt").write_text("\n".join(map(str, exchange.losses)))
        torch.save(values(recovery, model, exchange), folder / f"begin-{generation}-{rank}.pt")
        (folder / f"begin-{generation}-{rank}.json").write_text(json.dumps(story.to_dict()))
        first = recovery.batches_done

        def forward_backward(number):
            optimizer.zero_grad()
            model({"ebc": batch(100 * rank + number, BATCH, **ROWS)}).square().mean().backward()

        for number in range(first, first + MORE if generation else FAIL_AT):
            forward_backward(number)
            optimizer.step()
            generator = torch.Generator().manual_seed(100 * rank + number)
            flat = exchange.make_buffer()
            flat[:NUM_OWED] = torch.randn(NUM_OWED, generator=generator)
            exchange.combine(flat)
            recovery.step(samples=BATCH * dist.get_world_size())
            is_behind = scenario in {"lose_mirror_behind", "lose_mirror_old"}
            if "mirror" in scenario and recovery.steps_done == FAIL_AT - is_behind:
                wait_for_mirror(recovery)
                torch.save(values(recovery, model, exchange), folder / f"mirrored-{rank}.pt")
                if is_behind:
                    recovery._mirror._config = cpr.MirrorConfig(to="neighbour", every_steps=10**6)
            if recovery.steps_done in {BASE_AT, SAVE_AT}:
                recovery.checkpointer.wait_until_idle()
                name = "saved" if recovery.steps_done == SAVE_AT else "base"
                torch.save(values(recovery, model, exchange), folder / f"{name}-{rank}.pt")
        if generation == 0:
            torch.save(values(recovery, model, exchange), folder / f"alive-{rank}.pt")
            if scenario in {"lose_mirrored_again", "lose_mirror_behind"}:
                forward_backward(FAIL_AT)  # changes rows of a batch that will never be whole
            fail(scenario, recovery, rank)
        stories = [each.to_dict() for each in recovery.recoveries]
        (folder / f"recoveries-{rank}.json").write_text(json.dumps(stories))
    (folder / f"end-{rank}").touch()
    dist.destroy_process_group()
