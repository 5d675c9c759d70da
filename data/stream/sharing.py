"""Exchanges what ranks have to tell each other, by `torch.distributed` on the CPU."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from data.stream.agreement import Offer
from data.stream.injection import Gather

MESSAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 8
"""Of a message that a rank shares: its length, in a buffer that is as long on all ranks."""

Share = Callable[[Offer], Sequence[Offer]]
"""Gives the offers of all ranks, by rank; all ranks call it together."""


def gather_by(world_size: int) -> Gather:
    """Gather objects by `torch.distributed` on the CPU."""

    def gather(given: Any) -> Sequence[Any]:
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, given)
        return found

    return gather


def share_by(world_size: int) -> Share:
    """Share offers by `torch.distributed` on the CPU, in one small collective unless they are large."""
    gather = gather_by(world_size)

    def share(offer: Offer) -> Sequence[Offer]:
        if world_size == 1:
            return [offer]
        message = pickle.dumps(offer)
        own = np.zeros(MESSAGE_BYTES, np.uint8)
        own[:HEADER_BYTES] = np.frombuffer(len(message).to_bytes(HEADER_BYTES, "little"), np.uint8)
        if len(message) <= MESSAGE_BYTES - HEADER_BYTES:
            own[HEADER_BYTES : HEADER_BYTES + len(message)] = np.frombuffer(message, np.uint8)
        found = torch.empty(world_size, MESSAGE_BYTES, dtype=torch.uint8)
        dist.all_gather(list(found), torch.from_numpy(own))
        buffers = [each.tobytes() for each in found.numpy()]
        ends = [HEADER_BYTES + int.from_bytes(each[:HEADER_BYTES], "little") for each in buffers]
        if max(ends) <= MESSAGE_BYTES:
            return [pickle.loads(each[HEADER_BYTES:end]) for each, end in zip(buffers, ends, strict=True)]
        return gather(offer)

    return share
