"""A mirror is bit for bit what its owner's rows were at a moment, whatever ends in the middle."""

import shutil
import socket
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.extent import Extent
from cpr.mirror.chosen_rows import ChosenRows
from cpr.mirror.config import MirrorConfig
from cpr.mirror.copy import LOG_FILE, MOMENTS_KEPT, DeadCopy, Moment, Owner, ShardForm, digest_of
from cpr.mirror.keeper import Keeper
from cpr.mirror.link import PATIENCE_S, Link, LinkLostError
from cpr.mirror.mirror import Mirror, keepers
from cpr.mirror.pieces import NUMBERS, ShardRows, read_pieces
from cpr.rendezvous import WorkerInfo
from cpr.rendezvous.launcher_env import LOOPBACK, OwnAddress
from cpr.resident.home import Home
from cpr.resident.segment import Segment
from cpr.shards import add_row_columns, find_shards, table_groups
from tests.cpr.shards.models import bags, batch, sequences, shard

ROWS = {"a": 40, "b": 7, "c": 30}
EXTENT = Extent(table_fqn="t", table_shape=(4, 2), row_offset=0, num_rows=4, col_offset=0, num_cols=2)
WAIT_S = 20.0


class Pair:
    """An owner that trains, and its keeper, in one process."""

    def __init__(self, root, **config):
        layout = {"a": "tw", "b": "unfused", "c": "rw", "d": "tw"}
        self.model = shard(layout, bags=bags(**ROWS), sequences=sequences(d=9))
        group = next(group for group in table_groups(self.model) if group.tables[0].table_name == "a")
        self.columns = add_row_columns(group, 0, {"age": torch.int32}, lambda: None)
        group.emb_module.register_forward_pre_hook(self.age)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.shards = [each for each in find_shards(self.model, [self.dense]) if not each.replicated]
        config = MirrorConfig(to="neighbour", **config)
        num_slots = ChosenRows(config, self.shards, self.model).num_slots
        forms = tuple(ShardForm.of(each, num_slots.get(place)) for place, each in enumerate(self.shards))
        self.owner = Owner(session_id="s", rank=3, world_size=4, generation=2, shards=forms)
        self.root, self.home = root, Home("run", root)
        self.keeper = Keeper(self.home, OwnAddress(name=LOOPBACK, interface=LOOPBACK), "s")
        self.mirror = Mirror(
            config,
            self.keeper,
            [self.keeper.address],
            self.owner,
            self.shards,
            self.model,
            [self.dense],
        )
        self.steps, self.values = 0, {}

    def age(self, *_):
        """What the owner of a column does in each pass, to a row that the pass may not look up."""
        row = torch.tensor([self.steps % ROWS["a"]])
        self.columns.note_change(row)
        self.columns.tensors["age"][row] += 1

    def train(self, steps, wait=True):
        """Train, and remember the rows after each step; `wait` until each step's moment has arrived."""
        for _ in range(steps):
            self.dense.zero_grad()
            features = {"bags": batch(self.steps, 4, **ROWS), "sequences": batch(self.steps, 4, d=9)}
            self.model(features).square().sum().backward()
            self.dense.step()
            self.rest(wait)

    def rest(self, wait=True):
        """Take a moment, perhaps without having trained."""
        self.steps += 1
        self.values[self.steps] = [_clones(each.columns) for each in self.shards]
        self.mirror.step(self.steps, 5, {"own": {"batch": self.steps}})
        if wait:
            self.arrive()

    def arrive(self):
        """Wait until nothing is on its way."""
        wait_for(lambda: self.mirror._job is None)

    @property
    def copy(self):
        return self.keeper._copies[3]

    def check(self, segment=None):
        """Compare what is written into the copy with the rows of its step."""
        segment = segment or self.copy.segment
        step = segment.status.step_finished
        for live, held in self.rows(segment):
            assert live.keys() == held.keys()
            for name, column in held.items():
                assert torch.equal(column, live[name]), (step, name)
        assert DeadCopy(segment).state()["own"] == {"batch": step}
        assert (segment.status.epoch, segment.layout.is_mirror, segment.layout.rank) == (5, True, 3)
        return step

    def rows(self, segment):
        """Columns of the rows that a mirror holds, shard by shard: as they were at its step, and in it."""
        values = self.values[segment.status.step_finished]
        for live, held, mine in zip(values, segment.held_shards(), self.shards, strict=True):
            assert held.extent.name == mine.name
            columns, rows = dict(held.columns), torch.arange(held.extent.num_rows)
            if (numbers := columns.pop(NUMBERS, None)) is not None:
                slots = numbers.nonzero().view(-1)
                rows = numbers[slots] - 1
                assert rows.unique().numel() == rows.numel()
                columns = {name: column[slots] for name, column in columns.items()}
            yield {name: column[rows] for name, column in live.items()}, columns

    def left(self):
        """What the keeper would leave if it died now."""
        folder = self.root / f"left-{uuid.uuid4().hex}"
        return Segment(Path(shutil.copytree(self.copy.segment.folder, folder)))

    def check_moments(self):
        """Bring what a dead keeper left to each of its moments, oldest first; returns them, newest first."""
        segment = self.left()
        copy = DeadCopy(segment)
        steps = copy.steps
        assert copy.newest_state()["own"] == {"batch": steps[0]}
        for step in reversed(steps):
            copy.bring_to(step)
            copy.check()
            assert self.check(segment) == step
        return steps

    def check_newest(self):
        """Bring what a dead keeper left to its newest moment."""
        segment = self.left()
        DeadCopy(segment).bring_to(self.copy.step)
        return self.check(segment)

    def check_rounded(self):
        """Check that no more rows of the copy differ than are said to be rounded, and these in weights."""
        segment = self.left()
        copy = DeadCopy(segment)
        copy.bring_to(self.copy.step)
        state = copy.state()
        num_different = 0
        for live, held in self.rows(segment):
            for name in live.keys() - {"weights"}:
                assert torch.equal(held[name], live[name])
            num_different += int((held["weights"] != live["weights"]).any(1).sum())
            assert torch.allclose(held["weights"], live["weights"], rtol=0.01, atol=0.01)
        rounded = state["mirror"]["rounded"]
        assert num_different <= rounded == self.mirror.figures.rounded
        return rounded


def wait_for(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def _clones(columns):
    return {name: column.detach().clone() for name, column in columns.items()}


@pytest.fixture
def pair(world_of_one, tmp_path):
    pairs = []

    def make(**config):
        pairs.append(Pair(tmp_path, **config))
        return pairs[-1]

    yield make
    for each in pairs:
        each.mirror.close(remove=True)
        assert not list(each.home.folder.glob("mirror*"))


def test_every_moment_is_bit_for_bit_that_of_its_step(pair):
    made = pair()
    made.train(1)
    assert made.copy.step is None, "it is filled before its first moment"
    made.train(2)
    for _ in range(6):
        made.train(1)
        assert made.copy.step == made.steps == made.mirror.step_sent
        assert made.check() == made.steps - MOMENTS_KEPT
    figures = made.mirror.figures
    assert (figures.moments, figures.oldest) == (made.steps - 1, 1)
    assert figures.num_bytes > 36 * figures.num_rows > 0


def test_moments_are_skipped_while_one_is_on_its_way_and_nothing_is_missing(pair):
    made = pair(every_steps=3)
    made.train(40, wait=False)
    made.arrive()
    made.train(3)
    steps = made.check_moments()
    assert len(steps) == MOMENTS_KEPT + 1
    assert steps[0] > made.steps - 3


def test_a_lost_connection_costs_age_and_no_rows(pair, monkeypatch):
    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    made = pair()
    made.train(10)
    step = made.copy.step
    made.mirror._link.close()
    made.train(1)
    assert made.copy.step == step, "the moment that was on its way did not arrive"
    made.train(2)
    assert made.check_moments()[0] == made.steps


def test_a_keeper_that_dies_while_it_writes_leaves_the_whole_moment(pair, monkeypatch):
    made = pair()
    made.train(10)
    before, segment = made.check(), made.copy.segment
    began, died = threading.Event(), threading.Event()
    monkeypatch.setattr("cpr.mirror.copy._write_state", lambda *arguments: began.set() or died.wait())
    (_, oldest), _ = made.copy._whole
    made.train(1, wait=False)
    assert began.wait(WAIT_S)
    moment, data = oldest.read()
    pieces = read_pieces(data[: moment.pieces_bytes], [ShardRows(each.columns) for each in made.shards])
    for piece, held in zip(pieces, segment.held_shards(), strict=True):
        for column in held.columns.values():
            column[piece.rows] = 7  # half written
    monkeypatch.undo()
    try:
        left = DeadCopy(segment)
        left.check()
        assert left.steps == (before + 2, before + 1)
        assert made.check() == before + 1
    finally:
        died.set()


def test_no_room_for_a_moment_is_told_to_its_owner_and_no_rows_are_missing(pair, monkeypatch, caplog):
    def full(*arguments):
        raise NotEnoughMemoryError("enlarge it")

    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    made = pair()
    made.train(10)
    for place in ("_write_state", "MomentLog.reserve"):
        with monkeypatch.context() as patch:
            patch.setattr(f"cpr.mirror.copy.{place}", full)
            step = made.steps
            made.train(1, wait=False)
            wait_for(lambda step=step: f"stays at step {step}: 127.0.0.1: enlarge it" in caplog.text)
        made.train(5)
        assert made.check_moments() == (made.steps, made.steps - 1, made.steps - 2)


@pytest.mark.parametrize(
    ("column", "value"), [("weights", 0), ("weights", 3), ("weights", "exchanged"), ("age", 0), ("age", 3)]
)
def test_overwritten_rows_are_found(pair, column, value):
    made = pair()
    made.train(10)
    segment = made.left()
    rows = next(each.columns[column] for each in segment.held_shards() if column in each.columns)[:4]
    if value == "exchanged":
        rows[:] = rows.flip(0).clone()
    else:
        rows[:] = value
    with pytest.raises(DamagedMemoryError, match=r"rows of shard \d differ from their checksum"):
        DeadCopy(segment).check()


def test_a_moment_that_has_not_arrived_whole_leaves_the_ones_before(pair):
    made = pair()
    made.train(10)
    data = made.copy.receive(64).fill_(1)  # and the connection ends
    wrong = Moment(step=99, epoch=5, pieces_bytes=64, state_bytes=0, digest=digest_of(data))
    with pytest.raises(ValueError, match="no shard"):
        made.copy.put(wrong)
    assert made.check_moments() == (10, 9, 8)


def test_a_damaged_moment_is_named(pair):
    made = pair()
    made.train(10)
    made.copy._whole[0][1].data[3] = 7
    with pytest.raises(DamagedMemoryError, match=f"{LOG_FILE}. differs from its digest"):
        DeadCopy(made.copy.segment)


def test_no_room_is_told_at_the_start(world_of_one, tmp_path, monkeypatch):
    def full(*arguments):
        raise NotEnoughMemoryError("5 MB of shared memory are needed: enlarge it")

    monkeypatch.setattr("cpr.mirror.copy.MirrorCopy._allocate", full)
    home = Home("run", tmp_path)
    keeper = Keeper(home, OwnAddress(name=LOOPBACK, interface=LOOPBACK), "s")
    form = ShardForm(extent=EXTENT, columns={"weights": ("float32", (4, 2))})
    owner = Owner(session_id="s", rank=0, world_size=2, generation=0, shards=(form,))

    def introduce(key, owner):
        link = Link(replace(keeper.address, key=key))
        try:
            link.introduce(owner)
        finally:
            link.close()

    try:
        key = keeper.address.key
        with pytest.raises(NotEnoughMemoryError, match="enlarge it"):
            introduce(key, owner)
        with pytest.raises(LinkLostError, match="does not know the key"):
            introduce("another", owner)
        with pytest.raises(LinkLostError, match="ended"):
            introduce(key, replace(owner, session_id="another"))
    finally:
        keeper.close(remove=True)
    assert not list(home.folder.glob("mirror*"))


def test_the_next_node_keeps_a_mirror_or_the_one_after():
    def infos(*sizes):
        return [
            WorkerInfo(restarted=False, host="h", pid=1, local_rank=place, local_world_size=size)
            for size in sizes
            for place in range(size)
        ]

    assert keepers(infos(4)) is None
    assert keepers(infos(1, 1)) == [[1], [0]]
    assert keepers(infos(3, 1)) == [[3], [3], [3], [0]]
    assert keepers(infos(2, 2, 2)) == [[2, 4], [3, 5], [4, 0], [5, 1], [0, 2], [1, 3]]
    assert keepers(infos(1, 1, 1, 1)) == [[1, 2], [2, 3], [3, 0], [0, 1]]


def test_a_keeper_that_does_not_answer_delays_nothing(pair, monkeypatch):
    """As if its machine was stopped: connections are made, and nothing comes back."""
    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    made = pair()
    made.train(10)
    step = made.copy.step
    with socket.create_server((LOOPBACK, 0)) as silent:
        made.mirror._place = replace(made.mirror._place, port=silent.getsockname()[1])
        made.mirror._link.close()
        made.train(20, wait=False)
        wait_for(lambda: made.mirror._link is not None and made.mirror._link._socket.fileno() >= 0)
        began = time.monotonic()
        made.mirror.close(remove=False)
        assert time.monotonic() - began < PATIENCE_S / 2
    assert made.check_moments()[0] == step
    assert made.mirror.figures.age >= 19


@pytest.mark.parametrize("wire_dtype", ["bf16", "int8"])
def test_a_mirror_of_rounded_rows_becomes_exact(pair, monkeypatch, wire_dtype):
    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("cpr.mirror.mirror.REST_BYTES", 600)  # a few rows
    made = pair(wire_dtype=wire_dtype)
    made.train(12)
    num_rounded = made.check_rounded()
    assert num_rounded > 0
    made.mirror._link.close()
    made.train(3)
    assert made.check_rounded() > 0
    seen = [made.mirror.figures.rounded]
    while made.mirror.figures.rounded:
        made.rest()
        seen.append(made.check_rounded())
        assert seen[-1] < seen[-2]
    assert made.check_newest() == made.steps
    assert len(seen) > 2, "the rests of all rows did not fit into one moment"


@pytest.mark.parametrize("scheme", ["mfu", "ssu"])
@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
def test_a_mirror_of_chosen_rows_has_them_exactly(pair, monkeypatch, scheme, wire_dtype):
    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("cpr.mirror.chosen_rows.CHOICE_MOMENTS", 4)
    monkeypatch.setattr("cpr.mirror.chosen_rows.JOINING_BYTES", 250)  # six rows
    made = pair(rows="priority", scheme=scheme, memory="1500B", wire_dtype=wire_dtype)
    seen = set()
    for number in range(24):
        if number == 12:
            made.mirror._link.close()
        made.train(1)
        if made.mirror.step_sent is None:
            continue
        if wire_dtype == "fp32":
            assert made.check_newest() == made.mirror.step_sent
        else:
            made.check_rounded()
        first, *_ = made.copy.segment.held_shards()
        seen.update(first.columns[NUMBERS].tolist())
    held = sum(
        columns["weights"].shape[0] * mine.bytes_per_row
        for (_, columns), mine in zip(made.rows(made.copy.segment), made.shards, strict=True)
    )
    state = DeadCopy(made.copy.segment).state()
    total = sum(each.num_rows * each.bytes_per_row for each in made.shards)
    assert state["mirror"]["share"] == made.mirror.figures.share == pytest.approx(held / total)
    assert f"it holds {held / total:.1%} of the tables" in str(made.mirror.figures)
    assert len(seen - {0}) > made.owner.shards[0].extent.num_rows, "the choice never changed"
