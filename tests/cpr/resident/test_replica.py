"""A state that all workers have is read back whole, whatever the moment of death."""

import json
import os
import random
import signal
import time
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.resident import replica as module
from cpr.resident.replica import Replica
from cpr.resident.status_page import StatusPage
from tests.cpr.checkpoint.format.test_tree_file import TREES, bits


class Killed(BaseException):
    """Stands for a kill in the middle of something."""


def open_replica(folder):
    return Replica(folder, StatusPage(folder / "marks"))


@settings(max_examples=60)
@given(written=st.lists(TREES, min_size=1, max_size=4))
def test_the_last_tree_written_is_the_one_read(written, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replica")
    replica = open_replica(folder)
    for step, tree in enumerate(written):
        replica.write(step, tree)
        read_step, read_tree = open_replica(folder).read()
        assert read_step == step
        assert bits(tree) == bits(read_tree)


def test_no_reference_is_kept_in_either_direction(tmp_path):
    replica = open_replica(tmp_path)
    tree = {"a": torch.ones(3), "b": np.ones(3)}
    replica.write(1, tree)
    tree["a"].zero_()
    tree["b"][:] = 0
    _, first = replica.read()
    assert first["a"].tolist() == first["b"].tolist() == [1, 1, 1]
    first["a"].zero_()
    assert replica.read()[1]["a"].tolist() == [1, 1, 1]


@settings(max_examples=40)
@given(written=st.integers(0, 3), leaves=st.integers(1, 6), torn=st.integers(0, 6), grown=st.booleans())
def test_a_kill_while_a_slot_is_written_leaves_the_state_before(
    written, leaves, torn, grown, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("replica")
    replica = open_replica(folder)

    def tree(step, rows=50):
        return {"step": step, "leaves": [torch.full((rows,), float(step)) for _ in range(leaves)]}

    for step in range(written):
        replica.write(step, tree(step))

    def copy_some(sources, targets, _):
        for leaf, target in list(zip(sources, targets, strict=True))[:torn]:
            target.copy_(leaf.value)
        raise Killed

    last = tree(written, 5000 if grown else 50)
    with patch.object(module, "_copy", copy_some), pytest.raises(Killed):
        replica.write(written, last)
    found = open_replica(folder).read()
    if written == 0:
        assert found is None
    else:
        assert found[0] == written - 1
        assert bits(found[1]) == bits(tree(written - 1))


def _write_for_ever(pipe, folder):
    replica = open_replica(folder)
    step = 0
    while True:
        step += 1
        # large enough that most kills meet a copy, and of a size that changes
        tree = {"step": step, "values": [torch.full((20_000 + step % 7,), float(step)) for _ in range(20)]}
        replica.write(step, tree)
        if step == 3:
            pipe.send("writing")


@pytest.mark.system
def test_kill_9_at_any_moment_leaves_one_whole_state(tmp_path, start):
    moments = random.Random(4)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        folder.mkdir(0o700)
        child, pipe = start(_write_for_ever, folder)
        assert pipe.recv() == "writing"
        time.sleep(moments.random() * 0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        step, tree = open_replica(folder).read()
        assert step >= 3
        assert tree["step"] == step
        assert len(tree["values"]) == 20
        assert all(bool((value == step).all()) for value in tree["values"])


def test_what_cannot_be_saved_is_named_and_changes_nothing(tmp_path):
    replica = open_replica(tmp_path)
    replica.write(1, {"a": 1})
    with pytest.raises(ValueError, match=r"states\.loader cannot be saved"):
        replica.write(2, {"states": {"loader": object()}})
    assert replica.read() == (1, {"a": 1})


def test_no_room_is_an_error_and_the_state_before_still_counts(small_root):
    replica = open_replica(small_root)
    replica.write(1, {"a": torch.ones(1000)})
    with pytest.raises(NotEnoughMemoryError, match=r"--shm-size.*CPR_RESIDENT_ROOT"):
        replica.write(2, {"a": torch.ones(1_000_000)})
    assert replica.read()[0] == 1
    for step in (3, 4, 5):  # both slots have been laid out by now
        replica.write(step, {"a": torch.ones(1000)})
    with pytest.raises(NotEnoughMemoryError):
        replica.write(6, {"a": torch.ones(1_000_000)})
    assert replica.read()[0] == 5
    replica.write(7, {"a": torch.ones(1000)})
    assert replica.read()[0] == 7


@pytest.mark.parametrize("damage", ["magic", "tree", "short", "missing", "slot"])
def test_damage_is_refused(tmp_path, damage):
    replica = open_replica(tmp_path)
    replica.write(1, {"a": torch.ones(100)})
    path = tmp_path / "replica-1"
    path = path if path.exists() else tmp_path / "replica-0"
    data = bytearray(path.read_bytes())
    if damage == "slot":
        replica._status.slot = 5
    elif damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, 100)
    else:
        place = 0 if damage == "magic" else data.index(json.dumps("float32").encode())
        data[place] ^= 1
        path.write_bytes(data)
    with pytest.raises(DamagedMemoryError):
        replica.read()


def test_bytes_that_stay_are_not_copied_again_and_others_of_their_length_are(tmp_path, monkeypatch):
    replica, stays, changes = open_replica(tmp_path), b"x" * 100, [b"1" * 50, b"2" * 50, b"2" * 50, b"3" * 50]
    for step, changed in enumerate([changes[0], *changes, *changes]):
        number = torch.tensor(step)
        replica.write(step, {"stays": stays, "changes": changed, "number": number})
        assert open_replica(tmp_path).read() == (
            step,
            {"stays": stays, "changes": changed, "number": number},
        )
    replica.write(9, {"stays": b"y" * 100, "changes": b"", "more": stays})
    assert replica.read() == (9, {"stays": b"y" * 100, "changes": b"", "more": stays})
    tree, copied, frombuffer = {"story": b"z" * 10_000}, [], np.frombuffer
    monkeypatch.setattr(
        np, "frombuffer", lambda data, *how: copied.append(len(data)) or frombuffer(data, *how)
    )
    for step in range(4):
        replica.write(step, tree)
    assert copied.count(10_000) == 2, "once into each slot"


@settings(max_examples=60)
@given(
    kept=st.integers(1, 5),
    written=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    back=st.integers(0, 4),
)
def test_it_goes_back_to_the_newest_state_of_each_step_that_is_kept(kept, written, back, tmp_path_factory):
    folder = tmp_path_factory.mktemp("replica")
    replica, step, newest = open_replica(folder), 0, {}
    replica.keep(kept)
    for number, ahead in enumerate(written):  # by 0: the state of a step is written again
        step += ahead
        replica.write(step, {"number": number})
        newest[step] = number
    again = open_replica(folder)
    assert set(again.steps()) <= set(newest)
    assert len(again.steps()) >= min(len(newest), 1)
    assert max(again.steps()) == step
    goal = sorted(again.steps(), reverse=True)[: back + 1][-1]
    again.go_back(goal)
    assert again.read() == (goal, {"number": newest[goal]})
    again.forget_past()
    assert open_replica(folder).steps().keys() == {goal}
    again.write(goal + 1, {"number": -1})
    assert open_replica(folder).read() == (goal + 1, {"number": -1})
