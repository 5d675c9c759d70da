"""Tables that do not live in shared memory, as on a GPU, survive `kill -9` of their worker by a mirror."""

import socket
import time

import pytest
import torch

from cpr.errors import NotEnoughMemoryError, RunStoppedError
from cpr.mirror.config import MirrorConfig
from cpr.mirror.copy import HEADER_BYTES, LOG_FILE, DeadCopy
from cpr.mirror.pieces import NUMBERS
from cpr.recovery.decide.assessment import RecoveryPolicy
from cpr.resident.allocation import _Building, _names, _signature
from tests.cpr.recovery.workers import LAYOUT, assert_same

HOST = MirrorConfig(to="host")
WAIT_S = 20.0


@pytest.fixture(params=["fused", "unfused"])
def layout(request, monkeypatch):
    """Fused tables pretend to be on a GPU; those of an ordinary optimizer never live in shared memory."""
    if request.param == "unfused":
        return {"a": "unfused", "b": "tw", "c": "dp"}
    monkeypatch.setattr(
        _Building,
        "_move",
        lambda building, config, module: building._files(_signature(config, module, {}), [], _names(config)),
    )
    monkeypatch.setattr("cpr.mirror.mirror.can_wait", lambda shard: False)
    return LAYOUT


def arrive(worker):
    """Wait until the newest step is in the mirror."""
    recovery, deadline = worker.recovery, time.monotonic() + WAIT_S
    while True:
        assert time.monotonic() < deadline
        if recovery._mirror._job is None:
            if recovery._mirror.step_sent == recovery.steps_done:
                return
            recovery._mirror.step(recovery.steps_done, 1, recovery._publisher.mirrored_state())
        time.sleep(0.001)


def test_a_killed_worker_loses_nothing(new_worker, layout):
    worker = new_worker(restarted=False, layout=layout, mirror=HOST).restore().train(12)
    arrive(worker)
    alive = worker.values()
    worker.die()
    again = new_worker(layout=layout, mirror=HOST).restore()
    assert_same(again.values(), alive)
    story = again.story
    assert (story.kind, story.step, story.mirror_step, story.pls_added) == ("mirror", 12, 12, 0.0)
    assert story.bytes_read == 0
    again.train(3)
    arrive(again)
    alive = again.values()
    again.die()
    assert_same(new_worker(layout=layout, mirror=HOST).restore().values(), alive)


def test_a_killed_worker_without_a_mirror_loses_what_was_trained_since_the_save(new_worker, layout):
    policy = RecoveryPolicy(max_lost_share=1.0)
    new_worker(restarted=False, layout=layout).restore().train(10).wait_for_save().train(2).die()
    story = new_worker(layout=layout, policy=policy).restore().story
    assert (story.kind, story.step, story.save_step) == ("partial", 12, 10)
    assert (story.lost_share == 1) == ("unfused" not in layout.values())
    assert story.pls_added == pytest.approx(story.lost_share * 2 / 100)


def test_tables_in_shared_memory_need_no_mirror_there(new_worker, caplog):
    worker = new_worker(restarted=False, mirror=HOST).restore().train(3)
    assert worker.recovery.mirror is None
    assert "mirror.to has no effect: all tables live in shared memory" in caplog.text


def test_rows_that_a_mirror_of_chosen_rows_lacks_come_from_the_save(new_worker, layout, monkeypatch):
    monkeypatch.setattr("cpr.mirror.chosen_rows.CHOICE_MOMENTS", 4)
    config = MirrorConfig(to="host", rows="priority", memory="2500B")
    policy = RecoveryPolicy(max_lost_share=1.0)
    if "unfused" in layout.values():  # all of its rows change, and there is nothing to choose
        with pytest.raises(RunStoppedError, match=r"mirror\.memory is 2\.5 kB"):
            new_worker(restarted=False, layout=layout, mirror=config).restore()
        return
    worker = new_worker(restarted=False, layout=layout, mirror=config).restore()
    saved = worker.train(10).wait_for_save().values()
    worker.train(2)
    arrive(worker)
    alive, share = worker.values(), worker.recovery._mirror._chosen.share
    mirror = worker.recovery._mirror
    names, segment = [each.name for each in mirror._shards], mirror._keeper._copy.segment
    worker.die()
    copy = DeadCopy(segment)
    copy.bring_to(copy.steps[0])
    held = [each.columns[NUMBERS] for each in segment.held_shards()]
    rows = [numbers[numbers > 0] - 1 for numbers in held]
    again = new_worker(layout=layout, mirror=config, policy=policy).restore()
    for name, value in again.values().items():
        expected = alive[name]
        shard = name.rpartition("/")[0]
        if shard in names and value.dim():
            chosen = rows[names.index(shard)]
            assert 0 < len(chosen) < len(value)
            expected = saved[name].clone()
            expected[chosen] = alive[name][chosen]
            assert not torch.equal(expected, saved[name])
        assert torch.equal(value, expected), name
    story = again.story
    assert (story.kind, story.step, story.mirror_step, story.save_step) == ("partial", 12, 12, 10)
    assert 0 < share < 1
    assert story.pls_added == pytest.approx((1 - share) * 2 / 100)
    assert sum(each.mirrored for each in story.sources) == sum(map(len, rows))
    assert all(each.mirrored and each.lost and not each.moved for each in story.sources)
    assert story.lost_share == 1
    again.die()


def test_a_node_without_room_for_mirrors_is_named_and_stops_the_run(new_worker, layout, monkeypatch):
    monkeypatch.setattr("cpr.mirror.copy.MirrorCopy._allocate", _full)
    says = rf"{socket.gethostname()} \(shared memory\) has no room for the mirrors .* [kMG]?B of rows: 5 MB"
    for is_restarted in (False, True):
        worker = new_worker(restarted=is_restarted, layout=layout, mirror=HOST)
        with pytest.raises(RunStoppedError, match=says) as refused:
            worker.restore()
        assert str(refused.value).count("Restarts cannot help: stop the launcher") == 1
        worker.die(refused.value)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_worker_that_ends_by_itself_copies_its_tables_or_leaves_the_mirror(
    new_worker, layout, monkeypatch, has_room
):
    worker = new_worker(restarted=False, layout=layout, mirror=HOST).restore().train(12)
    arrive(worker)
    alive = worker.values()
    if not has_room:
        monkeypatch.setattr("cpr.resident.copy_out.CopyOut._copy", _full)
    worker.die(RuntimeError("a bug"))
    again = new_worker(layout=layout, mirror=HOST).restore()
    assert_same(again.values(), alive)
    assert (again.story.kind, again.story.bytes_read) == ("process" if has_room else "mirror", 0)


def _full(*_):
    raise NotEnoughMemoryError("5 MB of shared memory are needed: enlarge it")


def test_the_report_says_how_many_rows_were_rounded(new_worker, layout, monkeypatch):
    monkeypatch.setattr("cpr.mirror.mirror.REST_BYTES", 100)
    config = MirrorConfig(to="host", wire_dtype="int8")
    worker = new_worker(restarted=False, layout=layout, mirror=config).restore().train(12)
    arrive(worker)
    rounded = worker.recovery.mirror.rounded
    assert (rounded > 0) == (layout is LAYOUT)
    worker.die()
    story = new_worker(layout=layout, mirror=config).restore().story
    assert (story.kind, story.mirror_rounded) == ("mirror", rounded)


@pytest.mark.parametrize(
    ("files", "says"),
    [(f"{LOG_FILE}*", "differs from its digest"), ("rows-*", "rows of shard 0 differ from their checksum")],
)
def test_a_damaged_mirror_is_not_used(new_worker, layout, files, says):
    worker = new_worker(restarted=False, layout=layout, mirror=HOST).restore().train(10).wait_for_save()
    worker.train(2)
    arrive(worker)
    folder = worker.recovery._mirror._keeper._copy.segment.folder
    worker.die()
    damaged = list(folder.glob(files))
    assert damaged
    for path in damaged:
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + 8)
            file.write(b"damaged")
    again = new_worker(layout=layout, mirror=HOST, policy=RecoveryPolicy(max_lost_share=1.0)).restore()
    assert (again.story.kind, again.story.save_step, again.story.mirror_step) == ("partial", 10, None)
    assert any(says in refused for refused in again.story.refused)
    again.die()


@pytest.mark.parametrize("most_owed", [0, 1 << 20], ids=["emptied", "caught up"])
def test_shared_memory_that_is_full_for_a_while_ends_nothing(
    new_worker, layout, monkeypatch, caplog, most_owed
):
    monkeypatch.setattr("cpr.mirror.mirror.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("cpr.mirror.mirror.MOST_OWED", 0.0)
    monkeypatch.setattr("cpr.mirror.mirror.MOST_OWED_BYTES", most_owed)
    worker = new_worker(restarted=False, layout=layout, mirror=HOST).restore().train(12)
    arrive(worker)
    with monkeypatch.context() as patch:
        patch.setattr("cpr.mirror.copy.MomentLog.reserve", _full)
        worker.train(5)
        deadline = time.monotonic() + WAIT_S
        while "stays at step 12: 5 MB of shared memory" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    arrive(worker)
    assert ("is filled anew" in caplog.text) == (not most_owed)
    alive = worker.values()
    worker.die()
    again = new_worker(layout=layout, mirror=HOST).restore()
    assert_same(again.values(), alive)
    assert again.story.kind == "mirror"


def test_a_copy_that_was_made_within_a_step_is_not_taken_for_one_of_the_step_before(new_worker, layout):
    """What undoes steps knows nothing of the rows in it."""
    worker = new_worker(restarted=False, layout=layout, mirror=HOST).restore().train(12)
    arrive(worker)
    worker.forward_backward()
    alive = _weights(worker)
    worker.die(RuntimeError("a bug"))
    again = new_worker(layout=layout, mirror=HOST).restore()
    assert_same(_weights(again), alive)
    assert (again.story.kind, again.story.step, again.story.interrupted) == ("process", 12, True)


def _weights(worker):
    return {name: value for name, value in worker.values().items() if name.endswith("/weights")}
