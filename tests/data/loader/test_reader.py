"""A source that reads ahead is told what it will be asked for: all of it, in order, and no more."""

import pytest

from data.loader import DataLoader, LoaderConfig, ParquetSource
from data.loader.reader import ANNOUNCED

GROUPS = ((70, 50), (40,), (90, 30, 20), (60,))


class ReadingAhead:
    """Notes what it is told and asked."""

    def __init__(self, inner):
        self._inner = inner
        self.columns = inner.columns
        self.expected, self.reads = [], []

    def expect(self, part, row_group):
        one = (part.path, row_group)
        if one not in self.expected[len(self.reads) :]:
            self.expected.append(one)

    def read(self, part, row_group):
        self.reads.append((part.path, row_group))
        assert self.expected[: len(self.reads)] == self.reads
        assert len(self.expected) <= len(self.reads) + ANNOUNCED
        return self._inner.read(part, row_group)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("window_batches", [1, 3])
@pytest.mark.parametrize("drop_last", [True, False])
def test_reads_are_announced_in_order(tmp_path, make_dataset, world_size, window_batches, drop_last):
    manifest = make_dataset(tmp_path, row_groups=GROUPS)
    config = LoaderConfig(batch_size=16, window_batches=window_batches, drop_last=drop_last)
    for rank in range(world_size):
        source = ReadingAhead(ParquetSource(str(tmp_path), manifest))
        loader = DataLoader(str(tmp_path), config, rank=rank, world_size=world_size, source=source)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert source.expected == source.reads
        assert len(source.reads) > ANNOUNCED


def test_resumed_epoch_announces_only_remaining_row_groups(tmp_path, make_dataset):
    manifest = make_dataset(tmp_path, row_groups=GROUPS)
    config = LoaderConfig(batch_size=16, window_batches=3)
    first = DataLoader(str(tmp_path), config)
    batches = iter(first)
    for _ in range(8):
        next(batches)
    state = first.state_dict()
    first.close()
    source = ReadingAhead(ParquetSource(str(tmp_path), manifest))
    resumed = DataLoader(str(tmp_path), config, rank=1, world_size=2, source=source)
    resumed.load_state_dict(state)
    left = resumed.steps_left
    assert len(list(resumed)) == left
    assert source.expected == source.reads
