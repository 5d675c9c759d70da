import time
from dataclasses import replace

import torch

from experiments.harness.workload import TimedBatches, Workload

SMALL = Workload(rows=5000, global_batch_size=64, num_batches=2)


def test_the_parts_of_the_ranks_make_up_the_global_batch():
    whole = SMALL.batches(rank=0, world_size=1)
    parts = [SMALL.batches(rank, world_size=2) for rank in range(2)]
    for number, batch in enumerate(whole):
        ids = [part[number].sparse.values().view(26, 32) for part in parts]
        assert torch.equal(torch.cat(ids, dim=1), batch.sparse.values().view(26, 64))
        assert torch.equal(torch.cat([part[number].dense for part in parts]), batch.dense)
        assert torch.equal(torch.cat([part[number].labels for part in parts]), batch.labels)
    assert not torch.equal(whole[0].sparse.values(), whole[1].sparse.values())


def test_ids_fit_their_tables_and_the_top_percent_gets_three_quarters_of_the_accesses():
    (batch,) = replace(SMALL, global_batch_size=4096, num_batches=1).batches(rank=0, world_size=1)
    ids = batch.sparse.values()
    assert 0 <= ids.min() <= ids.max() < 5000
    assert abs((ids <= 50).float().mean() - 0.75) < 0.01


def test_the_jagged_tensor_is_consistent():
    (batch, _) = SMALL.batches(rank=0, world_size=1)
    assert batch.sparse.offsets().diff().tolist() == batch.sparse.lengths().tolist() == [1] * (26 * 64)
    second = batch.sparse[batch.sparse.keys()[1]]
    assert torch.equal(second.values(), batch.sparse.values()[64:128])


def test_time_is_the_consumers():
    ticks = []
    batches = TimedBatches(SMALL, steps=3, rank=0, world_size=1, after_step=lambda: ticks.append(1))
    for step, _ in enumerate(batches):
        time.sleep(0.05 if step == 1 else 0.0)
    assert len(batches.took_s) == len(ticks) == 3
    assert batches.took_s[1] >= 0.05
    assert batches.epoch == 1
