"""Workers of `test_wire` that measure their links together."""

import math
import os

import torch
import torch.distributed as dist

from dlrm.sharding.splitting.planning.cluster import measure

CPU = torch.device("cpu")


def measure_together() -> None:
    """All get the same answer, whatever is known of each link."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for here, agreed in ((2, 2), (1, 1), (num_ranks, num_ranks), (1 + rank % 2, num_ranks)):
        os.environ["LOCAL_WORLD_SIZE"] = str(here)
        cluster = measure(CPU)
        everybody = [None] * num_ranks
        dist.all_gather_object(everybody, cluster)
        assert everybody == [cluster] * num_ranks
        assert (cluster.num_ranks, cluster.ranks_per_node) == (num_ranks, agreed)
        for link, used in ((cluster.inside, agreed > 1), (cluster.between, agreed < num_ranks)):
            assert math.isfinite(link.bytes_per_s) == used
            assert link.bytes_per_s > 0
            assert (link.latency_s > 0) == used
        assert 0 < cluster.s_per_id < math.inf
        assert 0 < cluster.memory_bytes_per_s < math.inf
