"""The order of copies and of their use on a GPU, for which a recorder stands in."""

from contextlib import contextmanager

import pytest
import torch

from data.loader import DataLoader, LoaderConfig
from data.loader.copy_ahead import CopyAhead

GPU = torch.device("cuda", 0)


class Recorded:
    """A batch that notes what is done with it."""

    def __init__(self, number, calls):
        self.number, self.calls = number, calls

    def to(self, device, non_blocking):
        assert (device, non_blocking) == (GPU, True)
        self.calls.append(f"copy {self.number}")
        return self

    def record_stream(self, stream):
        assert stream == "current"
        self.calls.append(f"keep {self.number}")


@pytest.fixture
def calls(monkeypatch):
    made = []

    class Stream:
        def __init__(self, device):
            assert device == GPU

        def record_event(self):
            return len(made)

    class Current(str):
        def wait_event(self, event):
            made.append(f"after {made[event - 1]}")

    @contextmanager
    def on(stream):
        assert isinstance(stream, Stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current("current"))
    return made


def test_the_next_batch_is_copied_before_one_is_used(calls):
    for batch in CopyAhead(GPU).over(Recorded(number, calls) for number in range(3)):
        calls.append(f"train {batch.number}")
    assert calls == [
        *["copy 0", "copy 1", "after copy 0", "keep 0", "train 0"],
        *["copy 2", "after copy 1", "keep 1", "train 1"],
        *["after copy 2", "keep 2", "train 2"],
    ]


def test_a_loader_that_copies_ahead_has_the_position_of_the_batch_in_use(tmp_path, make_dataset):
    make_dataset(tmp_path)

    class OneAhead(CopyAhead):
        def __init__(self):
            pass

        def _begin(self, batch):
            return batch, None

        def _finish(self, batch, copied):
            return batch

    plain, ahead = (DataLoader(str(tmp_path), LoaderConfig(batch_size=8, window_batches=3)) for _ in range(2))
    ahead._copies = OneAhead()
    for expected, batch in zip(plain, ahead, strict=True):
        assert torch.equal(expected.dense, batch.dense)
        assert ahead.state_dict() == plain.state_dict()
    assert ahead.epoch == plain.epoch == 1
    plain.close()
    ahead.close()
