"""Dense sums over all ranks that are optimal in bytes: the backend's ring, or one with encoded values."""

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm import cost
from dlrm.comm.collectives.collective import Select
from dlrm.comm.collectives.encoded import EncodedSum
from dlrm.comm.collectives.messages import after, share, slices, swap
from dlrm.comm.links import Links


class Ring(EncodedSum):
    """An all-reduce of all values; with plain fp32, that of the backend.

    Encoded, each rank sums one slice in fp32: the others send it theirs, and it sends the sum to all. What
    either encoding loses stays behind with who encoded.

    Args:
        codec: for values on the wire.
        group: None is all ranks.
        buffers: as for `Collective`.
    """

    shape = "ring"

    def sent_bytes(self, num_values: int, num_kept: int) -> float:
        """As `Collective.sent_bytes`."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self._encoded_bytes(num_values)

    def predict_s(self, links: Links, num_values: int, num_kept: int) -> float:
        """As `Collective.predict_s`."""
        num_bytes = self._encoded_bytes(num_values)
        if self.is_lossless:
            link = links.slowest
            return cost.ring_s(link.latency_s, link.s_per_byte, self.num_ranks, num_bytes)
        link, num_slices = links.swapping, self.num_ranks
        return 2 * cost.all_gather_s(link.latency_s, link.s_per_byte, num_slices, num_bytes / num_slices)

    def _encoded_bytes(self, num_values: int) -> int:
        if self.is_lossless:
            return 4 * num_values
        return sum(
            self._packing.num_bytes(each.stop - each.start) for each in slices(num_values, self.num_ranks)
        )

    def _sum_in_place(self, vector: Tensor) -> None:
        dist.all_reduce(vector, group=self.group)

    def _reduce_into(self, total: Tensor, vector: Tensor, select: Select) -> None:
        bounds = slices(vector.numel(), self.num_ranks)
        sums = self._rooms("ring.sums", [each.stop - each.start for each in bounds], vector.device)
        own = vector[bounds[self.rank]]
        self._sum_slices([vector[each] for each in bounds], sums, own)
        self._packing.pack(own, sums[self.rank])
        share(sums, self.group)
        for each, encoded in zip(bounds, sums, strict=True):
            self._packing.unpack(encoded, total[each])

    def _sum_slices(self, pieces: list[Tensor], rooms: list[Tensor], own: Tensor) -> None:
        """Add what the others have for this rank's slice to `own`; `rooms` are free until then."""
        peers = after(self.rank, self.num_ranks)
        for peer in peers:
            self._packing.pack(pieces[peer], rooms[peer])
        received = self._rooms("ring.received", [own.numel()] * len(peers), own.device)
        swap({peer: rooms[peer] for peer in peers}, dict(zip(peers, received, strict=True)), self.group)
        for peer in sorted(range(len(peers)), key=peers.__getitem__):
            self._packing.add(received[peer], own)

    def _rooms(self, name: str, lengths: list[int], device: torch.device) -> list[Tensor]:
        """Memory for so many encoded values each."""
        room = [self._packing.aligned_bytes(length) for length in lengths]
        memory = self.buffers.take(name, sum(room), torch.uint8, device)
        return [
            part[: self._packing.num_bytes(length)]
            for part, length in zip(torch.split(memory, room), lengths, strict=True)
        ]
