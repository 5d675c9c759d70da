"""Whether the trainer works on a GPU, and how fast: `python -m experiments.gpu [--part NAME] [--quick]`.

It takes one GPU and at most eight minutes; without a GPU it says so and ends with status 1. Every part is
processes of its own with a time limit of its own: one that fails is reported, and the others run all the
same. `--part` runs one of them alone and stores its result in `runs/quick`.

- `tiny`: `dlrm.train --recipe tiny` in fp32, on the GPU and on the CPU.
- `terabyte`: steps of the recipe `terabyte` in fp32, on the GPU and on the CPU, from the same initial values.
- `speed`: `terabyte` in mixed precision with `train.pipeline=none` and `prefetch`, and TorchRec's DLRM under
  TrainPipelineSparseDist, in turns.
- `kill`: `tiny` saves, its worker is killed with -9 and restarted, and training ends as if it had not been.
- `copy_out`: the same with an exception and an abort, as by NCCL's watchdog, after which the GPU's tables are
  found in shared memory.

Figures:

- `gpu_samples_per_s`: samples/s of this trainer in `speed`, of the better pipeline in each round, the median.
- `gpu_ratio_to_torchrec`: the same over TorchRec's in that round, with `..._low` and `..._high`.
- `gpu_prefetch_speedup`: samples/s with `prefetch` over those with `none`, likewise. On one GPU nothing is
  exchanged: what is left of it is its cost.
- `gpu_loss_error`: the largest relative difference between a logged loss on the GPU and on the CPU, in `tiny`
  and `terabyte`; also `gpu_loss_error_tiny` and `gpu_loss_error_terabyte`.
- `gpu_kill_recovered`, `gpu_copy_out_recovered`: 1, or 0 if that part failed.

A figure whose part failed is missing, or 0, and its note says why; the command then ends with status 1.
"""

from collections.abc import Sequence
from typing import Final

from experiments.harness.command import experiment_parser, require_gpu

NAMES: Final = ("tiny", "terabyte", "speed", "kill", "copy_out")
"""Of the parts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and store the result; returns 1 if a part failed."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--part", choices=NAMES, help="run only this one; overwrites no stored result")
    options = parser.parse_args(arguments)
    require_gpu(parser)
    # imported here, as FBGEMM's build for CUDA cannot be imported without a driver
    from experiments.gpu.measure import measure  # noqa: PLC0415

    return measure(options.part, options.quick)
