"""Threads as workers, and a real store as the agent's; hosts and guests that die at every step."""

import os
import random
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_group_rank, get_local_rank, get_local_size

from cpr.errors import RendezvousError
from cpr.rendezvous import HeldSegment, WorkerGroup, init_process_group, join
from cpr.rendezvous.join import join_at
from cpr.rendezvous.launcher_env import LauncherEnv
from cpr.rendezvous.rank_assignment import assign_ranks
from cpr.rendezvous.stores import serve
from tests.cpr.rendezvous.workers import (
    ENOUGH,
    HERE,
    KEY,
    call,
    check,
    info,
    is_hung_up,
    listener,
    post,
    posted_host,
    seat,
    start,
)

pytestmark = pytest.mark.system

# --- a plain meeting ---


@pytest.mark.parametrize("world_size", [2, 3, 16])
def test_all_get_the_same(workers, place, world_size):
    check(start(workers, place, world_size), pids=list(range(world_size)))


def test_generations_one_after_another_on_one_board(workers, place):
    sessions = [check(start(workers, place, 3))[0].session_id for _ in range(10)]
    assert len(set(sessions)) == 10


def test_ranks_that_are_held_are_kept_and_offers_follow(workers, place):
    held = [
        HeldSegment(session_id="s", rank=rank, world_size=3, step_finished=5, generation=2) for rank in (2, 0)
    ]
    infos = [info(10, held[0]), info(11), info(12, held[1])]
    meetings = check(start(workers, place, 3, infos), pids=[12, 11, 10])
    assert [each.rank for each in meetings] == [2, 1, 0]
    assert (meetings[0].session_id, meetings[0].generation) == ("s", 3)


def test_ranks_of_a_node_stay_together_though_half_of_its_memory_is_lost(workers, agent):
    """Two nodes of two workers, which the launcher counts the other way round than before."""
    held = HeldSegment(session_id="s", rank=3, world_size=4, step_finished=5, generation=2)

    def at(rank, world_size):
        node = {"local_rank": rank % 2, "local_world_size": 2}
        return LauncherEnv(
            rank=rank, world_size=world_size, address="localhost", port=agent.port, of_agent=True, **node
        )

    infos = [info(10), info(11, held), info(12), info(13)]
    meetings = check(start(workers, at, 4, infos), pids=[12, 13, 10, 11])
    assert [each.rank for each in meetings] == [2, 3, 0, 1]


def test_where_no_agent_keeps_the_board_rank_0_does(workers):
    with listener() as free:
        port = free.getsockname()[1]

    def at(rank, world_size):
        return LauncherEnv(rank=rank, world_size=world_size, address="localhost", port=port, of_agent=False)

    check(start(workers, at, 3))


def test_the_board_may_come_last(workers):
    with listener() as free:
        port = free.getsockname()[1]

    def at(rank, world_size):
        return LauncherEnv(rank=rank, world_size=world_size, address="localhost", port=port, of_agent=True)

    futures = start(workers, at, 2)
    time.sleep(0.2)
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    check(futures)
    del store


# --- what earlier generations left ---


def test_an_announcement_of_a_dead_host(workers, agent, place):
    with listener() as dead:
        port = dead.getsockname()[1]
    post(agent, port)
    guests = [workers.submit(join_at, place(rank, 3), info(rank), ENOUGH) for rank in (1, 2)]
    time.sleep(0.1)
    check([workers.submit(join_at, place(0, 3), info(0), ENOUGH), *guests])


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\n\n", b"[1]\n", b'{"hello": 1}\n'])
def test_a_stranger_has_the_port_of_a_dead_host(workers, agent, place, answer):
    """It is silent, hangs up, or says things."""
    with listener() as stranger:
        post(agent, stranger.getsockname()[1])
        guest = workers.submit(join_at, place(1, 2), info(1), ENOUGH)
        caller = stranger.accept()[0]
        if answer is not None:
            caller.sendall(answer)
            caller.close()
        else:
            time.sleep(0.1)
        check([workers.submit(join_at, place(0, 2), info(0), ENOUGH), guest])
        caller.close()


@pytest.mark.parametrize("rubbish", ["", "{}", "[]", "no json", '{"address": 1}'])
def test_rubbish_on_the_board(workers, agent, place, rubbish):
    agent.set(KEY, rubbish)
    guest = workers.submit(join_at, place(1, 2), info(1), ENOUGH)
    time.sleep(0.1)
    check([workers.submit(join_at, place(0, 2), info(0), ENOUGH), guest])


def test_a_host_dies_with_half_of_its_guests(workers, place):
    guest = workers.submit(join_at, place(1, 3), info(1), ENOUGH)
    with posted_host(place, 3) as host:
        seat(host, 1)
    check(
        [workers.submit(join_at, place(rank, 3), info(rank), ENOUGH) for rank in (0,)]
        + [guest, workers.submit(join_at, place(2, 3), info(2), ENOUGH)]
    )


def test_a_host_that_lives_on_in_its_grace_period_is_left_for_the_next(workers, place):
    guest = workers.submit(join_at, place(1, 3), info(1), ENOUGH)
    with posted_host(place, 3) as old:
        seat(old, 1)  # and from now on it does nothing, but its connection stays open
        check(
            [
                workers.submit(join_at, place(0, 3), info(0), ENOUGH),
                guest,
                workers.submit(join_at, place(2, 3), info(2), ENOUGH),
            ]
        )


def test_a_newer_host_that_nobody_reaches_does_not_draw_guests_away(workers, agent, place):
    with listener() as dead:
        port = dead.getsockname()[1]
    guest = workers.submit(join_at, place(1, 2), info(1), ENOUGH)
    with posted_host(place, 2) as host:
        seat(host, 1)
        post(agent, port)
        time.sleep(0.1)
        infos = host.gather(time.monotonic() + 60)
        store = serve(HERE, ENOUGH)
        host.tell(assign_ranks(infos), infos, store.port)
    assert guest.result().rank == 1


@pytest.mark.parametrize("num_told", [1, 2])
def test_a_host_dies_while_it_tells(workers, place, num_told):
    """Some know the decision, but the store went with the host."""
    guests = [workers.submit(join_at, place(rank, 3), info(rank), ENOUGH) for rank in (1, 2)]
    with posted_host(place, 3) as host, listener() as dead:
        infos = host.gather(time.monotonic() + 60)
        port = dead.getsockname()[1]
        dead.close()
        for rank in list(host._guests)[num_told:]:
            host._hang_up(host._guests[rank][0])
        host.tell(assign_ranks(infos), infos, port)
    check([workers.submit(join_at, place(0, 3), info(0), ENOUGH), *guests], pids=[0, 1, 2])


def test_a_guest_that_died_waiting_is_not_counted(workers, place):
    with posted_host(place, 3) as host:
        dying = call(host)
        dying.send({"rank": 1, "world_size": 3, "offer": info(66).to_json()})
        seat(host, 1)
        dying.close()
        while host._guests:
            host.gather(time.monotonic() + 0.05)
        assert host.missing == [1, 2]
        guests = [workers.submit(join_at, place(rank, 3), info(rank), ENOUGH) for rank in (1, 2)]
        infos = host.gather(time.monotonic() + 60)
        assert [each.pid for each in infos] == [0, 1, 2]
        host.tell(assign_ranks(infos), infos, 1)
    check([workers.submit(join_at, place(0, 3), info(0), ENOUGH), *guests])


def test_the_old_worker_of_a_replaced_agent_makes_room(workers, place):
    orphan = workers.submit(join_at, place(1, 3), info(66), ENOUGH)
    with posted_host(place, 3) as host:
        seat(host, 1)
        newer = [workers.submit(join_at, place(1, 3), info(1), ENOUGH)]
        while not orphan.done():
            host.gather(time.monotonic() + 0.05)
        with pytest.raises(RendezvousError, match="another process came as rank 1"):
            orphan.result()
        newer.append(workers.submit(join_at, place(2, 3), info(2), ENOUGH))
        infos = host.gather(time.monotonic() + 60)
        store = serve(HERE, ENOUGH)
        host.tell(assign_ranks(infos), infos, store.port)
    assert [each.pid for each in infos] == [0, 1, 2]
    assert [each.result().infos for each in newer] == [tuple(infos)] * 2


def test_the_old_worker_of_a_replaced_agent_may_end_just_when_the_new_one_comes(place):
    def message(pid):
        return {"rank": 1, "world_size": 3, "offer": info(pid).to_json()}

    with posted_host(place, 3) as host:
        old, newer = call(host), call(host)
        old.send(message(66))
        while host.missing == [1, 2]:  # both are connected, and the old one has its seat
            host.gather(time.monotonic() + 0.05)
        newer.send(message(1))
        old.close()
        time.sleep(0.2)  # the host learns of both at once
        host.gather(time.monotonic() + 0.5)
        assert host.missing == [2]
        assert newer.wait(5)
        newer.close()


@pytest.mark.parametrize("change", [{"world_size": 2}, {"rank": 7}, {"rank": 0}, {"offer": {}}, {"rank": []}])
def test_who_does_not_belong_here_is_turned_away(place, change):
    with posted_host(place, 3) as host:
        good = {"rank": 1, "world_size": 3, "offer": info().to_json()}
        caller = call(host)
        caller.send(good | change)
        while not is_hung_up(caller.socket):
            host.gather(time.monotonic() + 0.05)
        assert host.missing == [1, 2]
        caller.close()


def test_the_world_changed_its_size(workers, place):
    with posted_host(place, 4) as old:  # first: the guest has only a second to find it
        stale = workers.submit(join_at, place(1, 4), info(66), timedelta(seconds=1))
        seat(old, 1)
        check(start(workers, place, 2))
    with pytest.raises(RendezvousError):
        stale.result()


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happened_before_the_last_host_wins(workers, agent, place, seed):
    """Doomed hosts that go at random steps, at random times, while guests come at random times."""
    chance = random.Random(seed)
    world_size = chance.randint(2, 5)
    delays = [chance.uniform(0, 0.3) for _ in range(world_size)]

    def guest(rank):
        time.sleep(delays[rank])
        return join_at(place(rank, world_size), info(rank), ENOUGH)

    guests = [workers.submit(guest, rank) for rank in range(1, world_size)]
    alive = []
    for _ in range(chance.randint(1, 4)):
        fate = chance.choice(["before posting", "after posting", "some seated", "told", "lives on"])
        doomed = posted_host(place, world_size)
        if fate == "before posting":
            continue
        host = doomed.__enter__()
        if fate == "some seated":
            seat(host, chance.randint(1, world_size - 1))
        elif fate == "told":
            infos = host.gather(time.monotonic() + 60)
            with listener() as dead:
                port = dead.getsockname()[1]
            host.tell(assign_ranks(infos), infos, port)
        elif fate == "lives on":
            alive.append(doomed)
            continue
        doomed.__exit__(None, None, None)
    check(
        [workers.submit(join_at, place(0, world_size), info(0), ENOUGH), *guests],
        pids=list(range(world_size)),
    )
    for doomed in alive:
        doomed.__exit__(None, None, None)


# --- nobody waits for ever, and everybody says for whom ---

SHORT = timedelta(seconds=1)
LONGER = timedelta(seconds=3)
"""Where something has to happen before it is over."""


def test_the_host_names_who_is_missing(workers, place):
    guest = workers.submit(join_at, place(2, 4), info(2), ENOUGH)
    host = workers.submit(join_at, place(0, 4), info(0), LONGER)
    with pytest.raises(RendezvousError, match=r"ranks 1, 3 of 4 did not come to the meeting within 3 s"):
        host.result()
    check([workers.submit(join_at, place(rank, 4), info(rank), ENOUGH) for rank in (0, 1, 3)] + [guest])


def test_a_guest_names_who_is_missing(workers, place):
    guest = workers.submit(join_at, place(1, 4), info(1), LONGER)
    with posted_host(place, 4) as host:
        while not guest.done():
            host.gather(time.monotonic() + 0.05)
    with pytest.raises(RendezvousError, match=r"no meeting of 4 workers within 3 s: ranks 2, 3 did not come"):
        guest.result()


def test_a_guest_says_that_the_host_never_came(place):
    with pytest.raises(RendezvousError, match=r"rank 0 did not come; it has left no word in .*localhost"):
        join_at(place(1, 2), info(), SHORT)


def test_a_guest_says_that_only_old_word_is_there(agent, place):
    with listener() as dead:
        port = dead.getsockname()[1]
    post(agent, port)
    with pytest.raises(RendezvousError, match=rf"rank 0 did not come; .*{port}.* is of an earlier one"):
        join_at(place(1, 2), info(), LONGER)


def test_a_frozen_host_holds_nobody_for_ever(agent, place):
    with listener() as frozen:
        post(agent, frozen.getsockname()[1])
        with pytest.raises(RendezvousError, match=r"rank 0 at localhost:\d+ does not answer"):
            join_at(place(1, 2), info(), LONGER)


@pytest.fixture
def impatient(monkeypatch):
    """Threads that a frozen or dead board holds are to end with the test."""
    monkeypatch.setattr("cpr.rendezvous.discovery._CALL_TIMEOUT", timedelta(seconds=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_board_holds_nobody_for_ever(impatient, rank):
    with listener() as frozen:
        port = frozen.getsockname()[1]
        where = LauncherEnv(rank=rank, world_size=2, address="localhost", port=port, of_agent=True)
        with pytest.raises(RendezvousError, match="it does not answer"):
            join_at(where, info(), SHORT)


def test_the_store_of_a_dead_agent_is_named_with_what_helps(impatient):
    with listener() as dead:
        port = dead.getsockname()[1]
    where = LauncherEnv(rank=1, world_size=2, address="localhost", port=port, of_agent=True)
    with pytest.raises(RendezvousError, match=rf"localhost:{port} cannot be reached .*cpr run -- torchrun"):
        join_at(where, info(), SHORT)


def test_a_port_that_is_taken_is_named():
    with listener() as other:
        port = other.getsockname()[1]
        where = LauncherEnv(rank=0, world_size=2, address="localhost", port=port, of_agent=False)
        with pytest.raises(RendezvousError, match="Address already in use"):
            join_at(where, info(), SHORT)


# --- the environment ---

LAUNCHED = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def nowhere(monkeypatch):
    for name in (*LAUNCHED, "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_one_meets_oneself(nowhere):
    worker_group = join(info(7, restarted=False), SHORT)
    assert (worker_group.rank, worker_group.world_size, worker_group.generation, worker_group.continues) == (
        0,
        1,
        0,
        False,
    )
    init_process_group(worker_group, "gloo", SHORT)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_a_world_of_one_keeps_its_session(nowhere):
    for name, value in LAUNCHED.items():
        nowhere.setenv(name, value)
    held = HeldSegment(session_id="s", rank=0, world_size=1, step_finished=5, generation=2)
    worker_group = join(info(7, held), SHORT)
    assert (worker_group.rank, worker_group.session_id, worker_group.generation) == (0, "s", 3)


def test_torchrec_agrees_with_the_environment_of_the_new_rank(nowhere):
    """What TorchRec calls a node is one, and the device of a rank is that of its worker."""
    node = {"GROUP_RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**LAUNCHED, **node, "WORLD_SIZE": "4", "RANK": "1"}.items():
        nowhere.setenv(name, value)
    # this node is the launcher's first, and has memory of ranks 2 and 3
    met = WorkerGroup(
        store=None, rank=3, world_size=4, session_id="s", generation=1, continues=True, infos=()
    )
    nowhere.setattr(sys.modules[join.__module__], "join_at", lambda *_: met)
    rank = join(info(), SHORT).rank
    assert (os.environ["RANK"], os.environ["GROUP_RANK"]) == ("3", "1")
    assert get_group_rank(4, rank) == int(os.environ["GROUP_RANK"])
    assert rank % get_local_size(4) == get_local_rank(4, rank) == int(os.environ["LOCAL_RANK"])


@pytest.mark.parametrize("missing", ["MASTER_PORT", "RANK", "WORLD_SIZE"])
def test_half_an_environment_is_a_clear_error(nowhere, missing):
    for name, value in LAUNCHED.items():
        if name != missing:
            nowhere.setenv(name, value)
    with pytest.raises(ValueError, match=f"{missing} is not: start workers by torchrun"):
        join(info(), SHORT)
