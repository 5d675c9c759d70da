"""How the memory of a job is shared out: worker processes, and the block of text that each parses at once."""

import os
from dataclasses import dataclass
from typing import Final

MIN_BLOCK_BYTES: Final = 256 << 10


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """What a job's processes need, as measured."""

    parent_bytes: int
    """Memory of the parent process, code included."""
    worker_bytes: int
    """Memory of a worker without a block, code included."""
    bytes_per_block_byte: int
    """Memory of a worker per byte of a block."""
    comfortable_block_bytes: int
    """A block below which a worker more gains nothing."""
    most_block_bytes: int
    """A block beyond which memory gains nothing."""

    def processes(self, memory_bytes: int) -> int:
        """Worker processes with a comfortable block each, at most one a core."""
        worker_bytes = self.worker_bytes + self.comfortable_block_bytes * self.bytes_per_block_byte
        return max(1, min(os.cpu_count() or 1, (memory_bytes - self.parent_bytes) // worker_bytes))

    def block_bytes(self, memory_bytes: int, num_processes: int) -> int:
        """Raw bytes that a worker parses at once, so that all processes stay within `memory_bytes`.

        Raises:
            ValueError: that is too little; the message has what is enough.
        """
        share = (memory_bytes - self.parent_bytes) // num_processes - self.worker_bytes
        block_bytes = share // self.bytes_per_block_byte
        if block_bytes < MIN_BLOCK_BYTES:
            least = self.worker_bytes + MIN_BLOCK_BYTES * self.bytes_per_block_byte
            needed = self.parent_bytes + num_processes * least
            raise ValueError(
                f"{num_processes} processes (or threads of a Dask worker) need at least --memory "
                f"{-(-needed >> 20)}M, not {memory_bytes >> 20}M; give more memory or fewer --processes "
                "(or start the workers with fewer --nthreads)"
            )
        return min(block_bytes, self.most_block_bytes)
