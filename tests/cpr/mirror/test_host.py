"""Tables that do not live in shared memory, as on a GPU, survive `kill -9` of their worker by a mirror."""

import time

import pytest

from cpr.mirror.config import MirrorConfig
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
    while recovery._mirror.step_sent != recovery.steps_done:
        assert time.monotonic() < deadline
        if recovery._mirror._job is None:
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
