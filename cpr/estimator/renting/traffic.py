"""What workers exchange in a training step, by their number and the batch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What workers exchange in a step."""

    dense_bytes: float
    """Of the gradients of all dense parameters, which a ring all-reduce sums."""
    pooled_bytes: float
    """Of a sample's embeddings and their gradients, over all tables that lie on one worker each."""

    def sent(self, workers: int, batch: int) -> float:
        """Bytes that a worker sends to others in a step, on average over workers."""
        dense = 2 * (workers - 1) / workers * self.dense_bytes
        return dense + pooled_share(workers) * batch * self.pooled_bytes


def pooled_share(workers: int) -> float:
    """Share of a global batch's embeddings and gradients that a worker sends to others, on average.

    Of its samples' part of them, `1 / workers`, all but that of its own tables travels.
    """
    return (workers - 1) / workers**2
