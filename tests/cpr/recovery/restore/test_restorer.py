"""Where per-rank states come from."""

from types import SimpleNamespace

from cpr.recovery.decide.inventory import Inventory
from cpr.recovery.restore.restorer import Restorer
from tests.cpr.recovery.decide.test_assessment import assess_all, mirror, segment, worker

OF_RANK_0, OF_RANK_1 = {"owed": 0}, {"owed": 1}


def inherited(reports, trees):
    """Per-rank states of gone workers that rank 0 of three takes over."""
    restorer = object.__new__(Restorer)
    restorer._group = SimpleNamespace(world_size=3, rank=0)
    restorer._progress = SimpleNamespace(steps_done=7)
    mine, gone = restorer._own_states(assess_all(reports), Inventory(reports[0], trees=trees))
    assert mine is None
    return gone


def test_a_state_is_inherited_once_though_a_mirror_has_it_too():
    """Of a worker whose rows ended with it, as on a GPU, another worker of now has the memory."""
    holder = worker(0, segment(0), mirror(1))
    trees = [{"own": OF_RANK_0}, {"own": OF_RANK_1}]
    rest = worker(1, segment(1, shards=(), whole_bytes=360))
    assert inherited([holder, rest], trees) == [OF_RANK_0]
    assert inherited([holder, worker(1)], trees) == [OF_RANK_1, OF_RANK_0]
