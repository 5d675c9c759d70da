"""The GPU of a rank, chosen where there is none: `torch.cuda` is replaced by answers."""

import pytest
import torch

from dlrm.launch.device import Ranks, resolve_device


@pytest.fixture
def gpus(monkeypatch):
    """Set the number of visible GPUs and whether the launcher chose them; returns the GPUs made current."""
    current = []
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")  # restored, as `resolve_device` sets it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    def see(number, by_launcher):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        if by_launcher:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))
        else:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return current

    return see


@pytest.mark.parametrize(
    ("visible", "by_launcher", "index"), [(8, False, 3), (4, True, 3), (1, True, 0)], ids=str
)
def test_the_gpu_of_a_rank_becomes_the_current_one(gpus, visible, by_launcher, index):
    current = gpus(visible, by_launcher)
    device = resolve_device("auto", Ranks(rank=11, local_rank=3, world_size=16))
    assert current == [device] == [torch.device("cuda", index)]


@pytest.mark.parametrize(("visible", "by_launcher"), [(1, False), (2, True)])
def test_a_rank_without_a_gpu_of_its_own_is_refused(gpus, visible, by_launcher):
    current = gpus(visible, by_launcher)
    with pytest.raises(ValueError, match=rf"local rank 3 has no GPU of its own: there are {visible};"):
        resolve_device("cuda", Ranks(rank=3, local_rank=3, world_size=4))
    assert not current
