"""A worker for test_torchrun: computes alone and with its peers, then fails or ends, depending on the
generation."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from cpr import forkserver


def prepare():
    import torch.distributed  # noqa: F401, PLC0415
    import torchrec  # noqa: F401, PLC0415


def work():
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415

    generation, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    drawn = torch.rand(1).item()
    store = f"file://{sys.argv[1]}/store-{generation}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.set_num_threads(2)
    weight = torch.full((300, 300), 1.0, requires_grad=True)
    (weight @ weight).sum().backward()  # threads of OpenMP and of autograd
    distributed.all_reduce(weight.grad)
    seen = {
        "generation": generation,
        "rank": rank,
        "name": Path("/proc/self/comm").read_text().strip(),
        "drawn": drawn,
        "gradient": weight.grad[0, 0].item(),
        "error_file": os.environ["TORCHELASTIC_ERROR_FILE"],
    }
    sys.stdout.write(f"{json.dumps(seen)}\n")  # in one piece, also unbuffered: both ranks write to one pipe
    sys.stdout.flush()
    distributed.barrier()
    if generation < 3:
        if rank == 1:
            record(fail)() if generation == 1 else os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return 0


def fail():
    raise ValueError("what went wrong")


if __name__ == "__main__":
    raise SystemExit(forkserver.run(prepare, work))
