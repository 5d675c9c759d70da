"""What all collectives have in common: they sum vectors over ranks, and leave behind what was not sent."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.collectives.buffers import Buffers
from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.links import Links

Select = Callable[[Tensor], Tensor]
"""From a vector fp32 `[n]`, or this rank's shard of it, to the indices int64 that are to travel."""


def share_of(num_kept: int, part: int, whole: int) -> int:
    """How many of `part` values are kept where `num_kept` of `whole` are; rounded up."""
    return min(part, -(-num_kept * part // whole)) if whole else 0


def keeping(compressor: Compressor, num_kept: int, num_values: int) -> Select:
    """Keeps `num_kept` of a vector `[num_values]`, and of a shard of it the same share, rounded up."""

    def select(part: Tensor) -> Tensor:
        return compressor.select(part, share_of(num_kept, part.numel(), num_values))

    return select


class Collective(ABC):
    """Sums vectors over the ranks of a group.

    Which messages travel, and of what length, depends only on what all ranks share, so that whatever a
    rank's values are, nobody waits for a message that does not come.

    Args:
        group: None is all ranks.
        buffers: memory to use; collectives that never run at the same time may share it.
    """

    name: str
    """For people; it includes how values are encoded."""
    is_sparse: bool
    """Whether it asks `select` what to send."""
    is_lossless: bool = False
    """Whether all is sent as it is, so that nothing is ever left behind and `sum_in_place` can be used."""

    def __init__(self, group: dist.ProcessGroup | None, buffers: Buffers | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.buffers = Buffers() if buffers is None else buffers

    def reduce(self, vector: Tensor, select: Select) -> Tensor:
        """The sum over ranks of what each of them sends; all ranks call it together.

        Over all ranks, `total` and the vectors afterwards add up to the vectors before, to rounding. What
        is not finite is sent and not kept, so that it spoils one sum and not all that follow.

        Args:
            vector: fp32 `[d]`, of equal length on all ranks; becomes what this rank did not send.
            select: what to send, for sparse collectives.

        Returns:
            `total`, fp32 `[d]`: the same bits on all ranks; its memory is used again by the next call.

        Raises:
            ValueError: the vector is not a contiguous fp32 vector.
        """
        total = self.buffers.take("total", vector.numel(), torch.float32, vector.device)
        self.reduce_into(total, vector, select)
        return total

    def reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        """As `reduce`, into memory that is there.

        Args:
            total: fp32 `[d]`, overwritten.
            vector: as there.
            select: as there.
        """
        if vector.dtype != torch.float32 or vector.dim() != 1 or not vector.is_contiguous():
            raise ValueError(
                f"a collective sums one contiguous fp32 vector, not {vector.dtype} of shape"
                f" {tuple(vector.shape)}; flatten the gradients into one first"
            )
        if self.num_ranks == 1 or self.is_lossless:
            total.copy_(vector)
            self.sum_in_place(total)
            vector.zero_()
        else:
            self._reduce_into(total, vector, select)

    def sum_in_place(self, vector: Tensor) -> None:
        """Replace `vector` by its sum over ranks, with no copy; of lossless collectives only.

        Args:
            vector: contiguous fp32 `[d]`, of equal length on all ranks.
        """
        if self.num_ranks > 1:
            self._sum_in_place(vector)

    @abstractmethod
    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """That leave a rank for others in a step, on average over ranks.

        Args:
            num_values: `d`.
            num_kept: of them, that each rank sends; of no meaning where all are sent.
        """

    @abstractmethod
    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """Seconds on the wire of a step; `dlrm.comm.cost` has the formulas.

        Args:
            links: of this group's ranks.
            num_values: as for `sent_bytes`.
            num_kept: as for `sent_bytes`.
        """

    @abstractmethod
    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        """`reduce_into`, of two ranks or more, where it is not lossless."""

    def _sum_in_place(self, vector: Tensor) -> None:
        """`sum_in_place`, of two ranks or more."""
        raise AssertionError(f"{self.name} leaves something behind: it has no sum in place")
