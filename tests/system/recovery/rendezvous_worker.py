"""A worker of `test_rendezvous` and `test_launch`: joins, all-reduces, and dies on request. Needs torch
only."""

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cpr.rendezvous import HeldSegment, WorkerInfo, init_process_group, join

TIMEOUT = timedelta(seconds=60)


def main():
    """Arguments: folder for what each worker saw; how many generations die by the hand of a worker.

    With -1 generations, the first waits to be killed from outside. Below `cpr run`, the worker before with
    this local rank leaves memory, or rather a file that says so.
    """
    folder, doomed = Path(sys.argv[1]), int(sys.argv[2])
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    continues = restart > 0 or "CPR_CONTINUES" in os.environ
    memory = folder / f"{os.environ.get('CPR_LAUNCH')}-{os.environ['LOCAL_RANK']}.memory"
    held = (HeldSegment(**json.loads(memory.read_text())),) if memory.exists() else ()
    began = time.monotonic()
    worker_group = join(
        WorkerInfo(restarted=continues, host=socket.gethostname(), pid=os.getpid(), held=held), TIMEOUT
    )
    meet_s = time.monotonic() - began
    init_process_group(worker_group, "gloo", TIMEOUT)
    total = torch.tensor(float(worker_group.rank))
    dist.all_reduce(total)
    saw = {
        "pid": os.getpid(),
        "rank": worker_group.rank,
        "launch": os.environ.get("CPR_LAUNCH"),
        "environment": [int(os.environ[name]) for name in ("RANK", "GROUP_RANK", "LOCAL_RANK")],
        "session": worker_group.session_id,
        "generation": worker_group.generation,
        "continues": worker_group.continues,
        "pids": [info.pid for info in worker_group.infos],
        "restart": restart,
        "sum": total.item(),
        "meet_s": meet_s,
    }
    if "CPR_LAUNCH" in os.environ:
        left = HeldSegment(
            session_id=worker_group.session_id,
            rank=worker_group.rank,
            world_size=worker_group.world_size,
            step_finished=0,
            generation=worker_group.generation,
        )
        memory.write_text(json.dumps(asdict(left)))
    (folder / f"{os.getpid()}.partial").write_text(json.dumps(saw))
    (folder / f"{os.getpid()}.partial").rename(folder / f"{os.getpid()}.json")
    dist.barrier()
    # each agent counts restarts of its own, and not all of them: what all agree on is what has been written
    generation = len(list(folder.glob("*.json"))) // worker_group.world_size - 1
    wait_for_death = generation < doomed if doomed >= 0 else not worker_group.continues
    dist.barrier()
    if generation < doomed and worker_group.rank == generation % worker_group.world_size:
        os.kill(os.getpid(), signal.SIGKILL)
    while wait_for_death:
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
