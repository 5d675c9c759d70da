"""Offers are the same on all ranks, small ones and large ones."""

import pytest
import torch.distributed as dist

from data.stream.agreement import Offer, PartitionState
from data.stream.sharing import MESSAGE_BYTES, share_by
from data.stream.source import Place

pytestmark = pytest.mark.system


def offer_of(rank: int, num_partitions: int) -> Offer:
    states = {
        f"{rank}-{number}": PartitionState(place=Place("a file " * 5, number), trained=7 * number)
        for number in range(num_partitions)
    }
    return Offer(size=rank, waiting=3, waited_s=0.5, idle_s=0.25, lag_s=rank / 3, states=states)


def share_all():
    dist.init_process_group("gloo")
    share, rank = share_by(3), dist.get_rank()
    for sizes in ((0, 0, 0), (2, 0, 5), (1, 400, 0), (500, 500, 500), (1, 1, 1)):
        expected = [offer_of(other, size) for other, size in enumerate(sizes)]
        assert share(expected[rank]) == expected
    dist.destroy_process_group()


def test_all_ranks_get_all_offers(start_ranks):
    assert MESSAGE_BYTES == 4096
    start_ranks(share_all, world_size=3).wait(timeout_s=60)
