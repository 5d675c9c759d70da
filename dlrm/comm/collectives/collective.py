"""The base class of all collectives, which sum vectors over ranks and leave behind the values not sent.

Messages between two ranks are all in flight at once and without copies; gloo's own all-gather and
reduce-scatter copy their input and send it around a ring, hop by hop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.links import Links

Select = Callable[[Tensor], Tensor]
"""A function from a vector fp32 `[n]`, or this rank's shard of it, to the indices int64 to send."""


def kept_in_part(num_kept: int, part: int, whole: int) -> int:
    """Scale `num_kept` of `whole` values to a part of them, rounded up."""
    return min(part, -(-num_kept * part // whole)) if whole else 0


def select_share(compressor: Compressor, num_kept: int, num_values: int) -> Select:
    """Make a `Select` that keeps `num_kept` of a vector `[num_values]`, and the same share of a shard."""

    def select(part: Tensor) -> Tensor:
        return compressor.select(part, kept_in_part(num_kept, part.numel(), num_values))

    return select


class Buffers:
    """Named tensors that are reused in each step, as first touch of fresh pages can outweigh an exchange.

    Collectives that never run at the same time may share one instance.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor `[size]` of any content, valid until the next `take` of the same name."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < size or (tensor.dtype, tensor.device) != (dtype, device):
            tensor = self._tensors[name] = torch.empty(size, dtype=dtype, device=device)
        return tensor[:size]

    def take_messages(self, name: str, lengths: Sequence[int], device: torch.device) -> list[Tensor]:
        """uint8 tensors of these lengths in one buffer, each aligned for fp32."""
        sizes = [-(-length // 4) * 4 for length in lengths]
        parts = torch.split(self.take(name, sum(sizes), torch.uint8, device), sizes)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]


class Collective(ABC):
    """Sums vectors over the ranks of a group.

    Number and length of messages depend only on what all ranks share, and never on a rank's values, so that
    no rank waits for a message that is not sent.
    """

    name: str
    """Name in logs; includes the encoding of values."""
    is_sparse: bool
    """Whether a `Select` chooses the values to send."""
    is_lossless: bool = False
    """Whether all values are sent in fp32, so that no residual remains and `sum_in_place` can be used."""

    def __init__(self, group: dist.ProcessGroup | None, buffers: Buffers | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.buffers = Buffers() if buffers is None else buffers

    def reduce(self, vector: Tensor, select: Select) -> Tensor:
        """Sum over ranks what each of them sends; all ranks call it together.

        Over all ranks, `total` and the vectors afterwards add up to the vectors before, to rounding. Values
        that are not finite are sent and not kept, so that they spoil one sum and not all later ones.

        Args:
            vector: contiguous fp32 `[d]`, of equal length on all ranks; becomes what this rank did not send.
            select: chooses the values to send, for sparse collectives.

        Returns:
            `total`, fp32 `[d]`: the same bits on all ranks; the next call reuses its memory.

        Raises:
            ValueError: the vector is not a contiguous fp32 vector.
        """
        total = self.buffers.take("total", vector.numel(), torch.float32, vector.device)
        self.reduce_into(total, vector, select)
        return total

    def reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        """Do the same as `reduce`, with the sum written to `total`, fp32 `[d]`."""
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
        """Replace a contiguous fp32 vector by its sum over ranks; for lossless collectives only."""
        if self.num_ranks > 1:
            self._sum_in_place(vector)

    @abstractmethod
    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """Bytes that leave a rank in a step, on average over ranks.

        Each rank sends `num_kept` of `num_values` values; dense collectives send all of them.
        """

    @abstractmethod
    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """Predict the seconds that a step spends on the wire, by the formulas of `dlrm.comm.cost`."""

    @abstractmethod
    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        """`reduce_into` of two ranks or more, for collectives that are not lossless."""

    def _sum_in_place(self, vector: Tensor) -> None:
        """`sum_in_place` of two ranks or more."""
        raise AssertionError(f"{self.name} leaves a residual: it has no sum in place")


def send_and_receive(
    outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Send contiguous tensors by target, a rank of the group, and overwrite those by source; wait for all.

    No message is sent for an empty tensor.
    """
    messages = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, tensors in ((dist.irecv, incoming), (dist.isend, outgoing))
        for peer, tensor in tensors.items()
        if tensor.numel()
    ]
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()


def all_gather_in_place(pieces: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill every rank's piece, a contiguous tensor, on all ranks; each rank has filled its own before."""
    rank = dist.get_rank(group)
    peers = peers_after(rank, len(pieces))
    send_and_receive(dict.fromkeys(peers, pieces[rank]), {peer: pieces[peer] for peer in peers}, group)


def peers_after(rank: int, num_ranks: int) -> list[int]:
    """List all other ranks from the next one on, so that no rank is the first target of all."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def split_evenly(num_values: int, num_ranks: int) -> list[slice]:
    """Split a vector among ranks into slices of equal length; the last ones may be shorter, or empty."""
    length = -(-num_values // num_ranks)
    return [
        slice(min(rank * length, num_values), min((rank + 1) * length, num_values))
        for rank in range(num_ranks)
    ]
