"""What all ranks learn when a save is committed."""

from cpr.checkpoint.history import History
from cpr.checkpoint.manifest import Manifest
from cpr.checkpoint.part import Part
from cpr.checkpoint.ranks import Alone
from cpr.checkpoint.retention import Retention
from tests.cpr.checkpoint.saves import MemoryStorage


class TwoRanks(Alone):
    """This rank and another one, which says the same but for how long it waited."""

    def __init__(self, their_blocked_s):
        super().__init__()
        self.their_blocked_s = their_blocked_s

    def gather(self, value):
        *same, _, is_out_of_time = value
        return [value, (*same, self.their_blocked_s, is_out_of_time)]


def manifest_of(parts):
    assert len(parts) == 2
    return Manifest(
        run_id="run",
        epoch=1,
        sequence=1,
        kind="base",
        parent=None,
        base=1,
        moment="rolling",
        step=10,
        created="2026-01-01T00:00:00+00:00",
        world_size=2,
        tables={},
        rows=(),
        states=(),
    )


def commit(blocked_s, their_blocked_s):
    history = History(
        storage=MemoryStorage(),
        group=TwoRanks(their_blocked_s),
        lock=None,
        retention=Retention(),
        merge_after=0,
        run_id="run",
        epoch=1,
        next_sequence=1,
        committed=[],
        chain=[],
    )
    manifest, longest_blocked_s = history.commit(1, "base", Part(), None, manifest_of, blocked_s)
    assert history.chain == [manifest]
    return longest_blocked_s


def test_how_long_training_waited_is_that_of_the_rank_that_waited_longest():
    assert commit(0.001, 0.4) == 0.4
    assert commit(0.4, 0.001) == 0.4
