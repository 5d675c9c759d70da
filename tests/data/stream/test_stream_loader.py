"""Batches of a stream on several ranks, each in a thread: weights, positions, the end, and what waits."""

import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch

from data.batch import Batch
from data.loader import FeedClosedError, LoaderConfig
from data.stream.agreement import Offer, Rules, limits
from data.stream.injection import Injection
from data.stream.loader import StreamLoader
from data.stream.source import START, Place
from tests.data.stream.streams import MANIFEST, MemoryStream

BATCH = 8


class Ranks:
    """Ranks in threads that share their offers."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._offers: list[Offer] = [None] * world_size

    def share(self, rank: int) -> Callable[[Offer], list[Offer]]:
        def share(offer: Offer) -> list[Offer]:
            self._offers[rank] = offer
            self._barrier.wait()
            offers = list(self._offers)
            self._barrier.wait()
            return offers

        return share

    def run(self, work: Callable[[int], object]) -> list:
        results, errors = [None] * self.world_size, []

        def target(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        if errors:
            raise errors[0]
        return results


def open_loader(
    stream: MemoryStream,
    ranks: Ranks,
    rank: int,
    end_after_s: float | None = 0.2,
    wait_s: float = 0.2,
    **options,
) -> StreamLoader:
    return StreamLoader(
        stream,
        MANIFEST,
        LoaderConfig(batch_size=BATCH),
        Rules(global_batch=BATCH * ranks.world_size, wait_s=wait_s, end_after_s=end_after_s),
        rank=rank,
        world_size=ranks.world_size,
        share=ranks.share(rank),
        **options,
    )


def ids_of(batch: Batch) -> list[int]:
    return batch.sparse.values().tolist()


def full(num_partitions: int, count: int) -> MemoryStream:
    stream = MemoryStream(num_partitions)
    for name in stream.partitions:
        stream.arrive(name, count)
    return stream


def train_all(stream: MemoryStream, world_size: int, state=None, steps: int = 10**6, **options):
    """Batches of all ranks by step, and the position after the last."""
    ranks = Ranks(world_size)

    def work(rank: int):
        with closing(open_loader(stream, ranks, rank, **options)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches, sizes, positions = [], [], [loader.state_dict()]
            for batch in loader:
                batches.append(batch)
                sizes.append(loader.step_samples)
                positions.append(loader.state_dict())
                if len(batches) == steps:
                    break
            return batches, sizes, positions, loader.epoch

    found = ranks.run(work)
    first = found[0]
    assert all(each[1:] == first[1:] for each in found), "all ranks know the same"
    return [each[0] for each in found], first[1], first[2], first[3]


def test_each_record_comes_once_and_weighs_the_same():
    stream = full(5, 101)
    batches, sizes, _, over = train_all(stream, 3)
    seen = [each for own in batches for batch in own for each in ids_of(batch)]
    assert sorted(seen) == sorted(stream.ids)
    assert over == 1
    assert sum(sizes) == 505
    assert set(sizes[:-2]) == {BATCH * 3}, "steps are full as long as records wait"
    for step, size in enumerate(sizes):
        parts = [own[step] for own in batches]
        assert sum(part.num_valid for part in parts) == size
        for part in parts:
            assert part.weight == part.num_valid / BATCH
            assert part.labels.shape == (max(part.num_valid, 1),)
            assert part.dense.shape == (max(part.num_valid, 1), 1)


def test_a_rank_without_records_has_a_batch_without_weight():
    stream = MemoryStream(2)
    stream.arrive("p0", 40)
    batches, sizes, _, _ = train_all(stream, 2)
    assert sum(sizes) == 40
    for batch in batches[1]:
        assert (batch.weight, batch.num_valid) == (0.0, 0)
        assert batch.sparse.stride() == 1
        assert ids_of(batch) == []
        assert torch.equal(batch.labels, torch.zeros(1))


@pytest.mark.parametrize("first_look_s", [0.0, 0.3])
def test_the_first_batches_too_are_in_proportion_to_what_waits(first_look_s):
    """Also where a rank takes longer for its first look at the stream."""
    stream, ranks = MemoryStream(2), Ranks(2)
    stream.arrive("p0", 3000)
    stream.arrive("p1", 1000)

    class Slow(MemoryStream):
        def waiting(self, partition: str, place: Place) -> int:
            time.sleep(first_look_s if place == START else 0)
            return super().waiting(partition, place)

    slow = Slow(2)
    slow.lengths = stream.lengths

    def work(rank: int) -> list[int]:
        with closing(open_loader(slow if rank else stream, ranks, rank, wait_s=9.0)) as loader:
            return [batch.num_valid for batch, _ in zip(loader, range(3), strict=False)]

    first, second = ranks.run(work)
    assert [one + other for one, other in zip(first, second, strict=True)] == [2 * BATCH] * 3
    assert {abs(size - 3 * BATCH // 2) for size in first} <= {0, 1}


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_dealt_records_are_trained_once_with_the_same_weight_by_ranks_by_chance(share):
    stream, ranks = full(3, 400), Ranks(3)

    def work(rank: int):
        injection = Injection(share, rank, seed=1, gather=ranks.share(rank))
        with closing(open_loader(stream, ranks, rank, injection=injection)) as loader:
            batches = [(batch, loader.step_samples) for batch in loader]
            return batches, loader.state_dict(), loader.figures

    found = ranks.run(work)
    seen = [each for batches, *_ in found for batch, _ in batches for each in ids_of(batch)]
    assert sorted(seen) == sorted(stream.ids)
    for step in zip(*(batches for batches, *_ in found), strict=True):
        assert sum(batch.num_valid for batch, _ in step) == step[0][1]
        assert [batch.weight for batch, _ in step] == [batch.num_valid / BATCH for batch, _ in step]
    assert found[0][1:] == found[1][1:], "positions stay with who has read the records"
    assert found[0][2].trained == 1200
    own = {stream.id_of("p0", number) for number in range(400)}
    stayed = sum(each in own for batch, _ in found[0][0] for each in ids_of(batch)) / 400
    assert abs(stayed - (1 - share * 2 / 3)) <= (0.12 if share else 0)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_position_goes_on_at_any_number_of_ranks(steps, world_size):
    stream = full(5, 61)
    before, _, positions, over = train_all(stream, 3, steps=steps)
    assert over == 0
    after, _, _, _ = train_all(stream, world_size, state=positions[-1])
    seen = [each for own in (*before, *after) for batch in own for each in ids_of(batch)]
    assert sorted(seen) == sorted(stream.ids)


def test_upcoming_batches_are_those_that_come_and_do_not_move_the_position():
    stream, ranks = full(2, 100), Ranks(2)

    def work(rank: int):
        with closing(open_loader(stream, ranks, rank)) as loader:
            ahead, shown = [], 0
            for batch in loader:
                if ahead:
                    assert ahead[0] is batch
                position = loader.state_dict()
                ahead = loader.upcoming(2)
                shown += len(ahead)
                assert loader.state_dict() == position
        return shown

    first, second = ranks.run(work)
    assert first == second
    assert first >= 8


def test_an_end_that_is_seen_ahead_does_not_move_the_position():
    stream = full(1, 2 * BATCH)
    stream.bad = {stream.id_of("p0", 2 * BATCH)}
    stream.arrive("p0", 1)
    with closing(open_loader(stream, Ranks(1), 0, end_after_s=0.1)) as loader:
        batches = iter(loader)
        next(batches)
        position, until = loader.state_dict(), time.monotonic() + 30
        while loader.steps_left and not loader._is_over:
            assert time.monotonic() < until
            assert loader.upcoming(2)[0].num_valid == BATCH
            time.sleep(0.02)
        assert loader.state_dict() == position
        assert loader.steps_left == 1
        next(batches)
        with pytest.raises(StopIteration):
            next(batches)
        assert (loader.figures.trained, loader.figures.bad) == (2 * BATCH, 1)


def test_upcoming_does_not_wait():
    stream, ranks = MemoryStream(1), Ranks(1)
    stream.arrive("p0", BATCH)
    loader = open_loader(stream, ranks, 0, wait_s=60, end_after_s=None)
    batches = iter(loader)
    next(batches)
    assert loader.upcoming(1) == []
    stream.arrive("p0", BATCH)
    assert len(next(batches).labels) == BATCH
    loader.close()
    with pytest.raises(FeedClosedError):
        next(batches)
    assert stream.closed


def test_a_stop_while_nothing_comes():
    class StoppedError(Exception): ...

    stream, ranks, calls = MemoryStream(2), Ranks(2), []

    def work(rank: int):
        loader = open_loader(stream, ranks, rank, end_after_s=None)

        def stop() -> None:
            calls.append(rank)
            if calls.count(rank) == 3:
                raise StoppedError

        loader.while_waiting = stop
        with pytest.raises(StoppedError):
            next(iter(loader))
        loader.close()

    ranks.run(work)
    assert calls.count(0) == calls.count(1) == 3


class Slow(MemoryStream):
    """Shows its records only after a look that takes longer than `end_after_s`."""

    is_quiet = False

    def fetch(self, places, at_most):
        if not self.is_quiet:
            time.sleep(0.6)
            self.is_quiet = True
            for name in self.partitions:
                self.arrive(name, 50)
        return super().fetch(places, at_most)

    def waiting(self, partition, place):
        return super().waiting(partition, place) if self.is_quiet else 0


def test_a_stream_does_not_end_before_a_look_at_it_has_succeeded():
    batches, _, _, over = train_all(Slow(2), 1, end_after_s=0.2)
    assert sum(len(ids_of(batch)) for batch in batches[0]) == 100
    assert over == 1

    class Away(MemoryStream):
        is_quiet = False

    stream, ranks = Away(1), Ranks(1)
    with closing(open_loader(stream, ranks, 0, end_after_s=0.1)) as loader:
        began = time.monotonic()

        def stop() -> None:
            if time.monotonic() > began + 1:
                raise TimeoutError

        loader.while_waiting = stop
        with pytest.raises(TimeoutError):
            next(iter(loader))


def test_the_counts_at_the_end_have_all_records():
    stream = full(2, 100)
    stream.bad = {stream.id_of("p0", number) for number in (3, 97, 98, 99)}
    ranks = Ranks(2)

    def work(rank: int):
        with closing(open_loader(stream, ranks, rank)) as loader:
            for _ in loader:
                pass
            return loader.figures

    first, second = ranks.run(work)
    assert first == second
    assert (first.trained, first.bad, first.left_out, first.waiting) == (196, 4, 0, 0)


def test_a_stream_of_bad_records_alone_does_not_end_well():
    stream = full(1, 10)
    stream.bad = set(range(10))
    with pytest.raises(ValueError, match="none of its records was trained: 10 cannot be"):
        train_all(stream, 1)
    assert train_all(full(1, 0), 1)[0] == [[]], "an empty one does"


def test_too_many_bad_records_end_a_run_that_goes_on_too():
    stream = full(1, 5000)
    stream.bad = set(range(0, 3000, 5))
    state = StreamLoader.state_dict(open_loader(stream, Ranks(1), 0))
    state["partitions"] = {"p0": ["000000", 1000, [], 800, 0, 200]}
    with pytest.raises(ValueError, match="of the first"):
        train_all(stream, 1, state=state, steps=50)


def test_too_many_bad_records_end_the_run(caplog):
    stream = full(1, 5000)
    stream.bad = set(range(0, 5000, 5))
    with pytest.raises(
        ValueError, match=r"cannot be trained, most of them for this reason: \d* is bad\. Is this"
    ):
        train_all(stream, 1)
    told = [each for each in caplog.messages if "left out" in each]
    assert told[:2] == [
        "p0, record 0: left out: 0 is bad",
        "p0, record 45: left out (one of 10 alike so far): 45 is bad",
    ]
    assert len(told) <= 4, "the same mistake with other values"


def test_what_waits_is_cut_counted_and_part_of_the_position():
    stream = full(4, 1000)
    batches, _, positions, _ = train_all(stream, 2, backlog=100, policy="newest")
    seen = sorted(each for own in batches for batch in own for each in ids_of(batch))
    assert len(set(seen)) == len(seen) < 600
    newest = {stream.id_of(name, 999) for name in stream.partitions}
    assert newest <= set(seen)
    counted = list(positions[-1]["partitions"].values())
    assert sum(state[3] for state in counted) == len(seen)
    assert sum(state[4] for state in counted) == 4000 - len(seen)


def test_refusals():
    stream, ranks = full(2, 10), Ranks(3)
    with pytest.raises(
        ValueError, match="2 partitions, and each of 3 ranks reads some of its own: start fewer"
    ):
        open_loader(stream, ranks, 0)
    loader = open_loader(stream, Ranks(1), 0)
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    state = loader.state_dict()
    with pytest.raises(ValueError, match="has stream 'other', but the loader has 'memory': resume with"):
        loader.load_state_dict({**state, "stream": "other"})
    with pytest.raises(ValueError, match="no partition p9 any more"):
        loader.load_state_dict({**state, "partitions": {**state["partitions"], "p9": ["", 0, [], 0, 0, 0]}})
    loader.close()


def test_limits_follow_what_waits():
    def offers(*waiting: int) -> list[Offer]:
        return [Offer(size=0, waiting=each, waited_s=0, idle_s=0, lag_s=0) for each in waiting]

    assert limits(offers(0, 0, 0), 12) == [4, 4, 4]
    assert limits(offers(300, 100), 10) == [7, 3]
    assert limits(offers(10**6, 0), 64) == [63, 1]
    assert limits(offers(5, 5, 5), 3) == [1, 1, 1]
