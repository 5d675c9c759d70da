"""Writes bytes once into new shared memory: `python -m experiments.growth.write BYTES FILE`.

Prints the seconds. What a first build is compared with; the memory is given back by the caller.
"""

import sys
from time import perf_counter

import torch


def main(num_bytes: int, path: str) -> None:
    """Write, with one thread."""
    torch.set_num_threads(1)
    source = torch.ones(2**20)
    began = perf_counter()
    memory = torch.from_file(path, shared=True, size=num_bytes // 4)
    for part in torch.split(memory, source.numel()):
        part.copy_(source[: part.numel()])
    print(perf_counter() - began)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
