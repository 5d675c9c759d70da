"""The choice of a schedule, and which batches it works ahead on."""

from itertools import chain

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.batch import Batch
from dlrm.config.schema import TrainConfig
from dlrm.pipeline import schedules
from dlrm.pipeline.build import make_schedule
from dlrm.pipeline.collection import SentIds
from dlrm.pipeline.schedules import Fastest, Plain, Prefetch, PrefetchIds, Waves


class Counting:
    """A schedule whose steps take so long by the clock of the test."""

    def __init__(self, clock, step_s):
        self.clock, self.step_s, self.steps = clock, step_s, []

    def step(self, batch, upcoming):
        self.clock[0] += self.step_s
        self.steps.append(batch)


@pytest.mark.parametrize(
    ("took_s", "chosen"),
    [((1.0, 0.95, 0.9), "prefetch"), ((1.0, 1.05, 1.1), "none"), ((1.0, 0.9, 1.1), "ids")],
)
def test_the_fastest_schedule_is_kept(took_s, chosen, world_of_one, monkeypatch, caplog):
    clock = [0.0]
    monkeypatch.setattr(schedules, "perf_counter", lambda: clock[0])
    for name, step_s in zip(("Plain", "PrefetchIds", "Prefetch"), took_s, strict=True):
        monkeypatch.setattr(schedules, name, lambda model, step_s=step_s: Counting(clock, step_s))
    fastest = Fastest(torch.nn.Linear(1, 1))
    candidates = fastest._candidates
    num_timed = 3 * schedules.TURNS * (schedules.UNTIMED_STEPS + schedules.TIMED_STEPS)
    with caplog.at_level("INFO"):
        for number in range(num_timed + 7):
            if number == 20:
                clock[0] += 100  # as an evaluation takes
            fastest.step(number, None)
    assert fastest.chosen == chosen
    counts = {name: len(each.steps) for name, each in candidates.items()}
    assert counts == {**dict.fromkeys(candidates, num_timed // 3), chosen: num_timed // 3 + 7}
    assert sorted(chain(*(each.steps for each in candidates.values()))) == list(range(num_timed + 7))
    assert candidates[chosen].steps[-7:] == list(range(num_timed, num_timed + 7))
    assert f"train.pipeline=auto: {chosen} from now on" in caplog.text


def test_one_rank_exchanges_nothing(world_of_one):
    for name in ("none", "ids", "prefetch", "auto"):
        assert type(make_schedule(TrainConfig(pipeline=name), torch.nn.Linear(1, 1))) is Plain


def click_model(shard_model):
    return shard_model({"cat_1": "table_wise", "cat_2": "table_wise"})


def test_batches_that_were_not_announced_are_trained_too(shard_model, make_batch):
    """After the end of an epoch, or where another schedule has trained some."""
    batches = [make_batch(8, seed) for seed in range(8)]
    announced = {0: [1, 2], 1: [2, 3], 2: [5, 6], 5: [], 4: [6, 7], 6: [7]}
    results = []
    for make in (Plain, Prefetch, PrefetchIds):
        model = click_model(shard_model)
        schedule, losses = make(model), []
        for number in (0, 1, 2, 5, 4, 6, 7):

            def upcoming(count, number=number):
                return [batches[each] for each in announced.get(number, [])][:count]

            losses.append(schedule.step(batches[number], upcoming).loss.item())
        results.append(losses)
    assert results[0] == results[1] == results[2]


class Transforming(torch.nn.Module):
    """Looks up other ids than those of the batch."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, dense, sparse):
        values = sparse.values().flip(0) % 7
        changed = KeyedJaggedTensor(keys=sparse.keys(), values=values, lengths=sparse.lengths())
        return self.inner(dense, changed)


class Wrapper(torch.nn.Module):
    """A model in another one, which counts its calls."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0


class Whimsical(Wrapper):
    """Calls the tables once, twice, not at all, also with other ids, or changes the ids in place."""

    def __init__(self, inner):
        super().__init__(inner)
        self.alone = torch.nn.Linear(13, 1)

    def forward(self, dense, sparse):
        self.calls += 1
        if self.calls == 8:
            sparse.values().remainder_(5)
        if self.calls == 4:
            return self.alone(dense).squeeze(1)
        logits = self.inner(dense, sparse)
        if self.calls == 3:
            other = KeyedJaggedTensor(
                keys=sparse.keys(), values=sparse.values().flip(0) % 7, lengths=sparse.lengths()
            )
            logits = logits + self.inner(dense, other)
        return logits + self.inner(dense, sparse) if self.calls == 6 else logits


def test_models_may_look_up_more_or_less_than_they_did_first(shard_model, make_batch, whole_tables):
    results = []
    for make in (Plain, Prefetch):
        batches = [make_batch(16, seed) for seed in range(10)]
        torch.manual_seed(0)
        model = Whimsical(shard_model({f"cat_{number}": "table_wise" for number in range(4)}))
        schedule, found = make(model), []
        for number, batch in enumerate(batches):
            later = batches[number + 1 :]
            found.append(schedule.step(batch, lambda count, later=later: later[:count]).loss.item())
        results.append((found, whole_tables(model.inner)))
    assert schedule.collections[0].is_early
    assert results[0][0] == results[1][0]
    for name, table in results[0][1].items():
        assert torch.equal(table, results[1][1][name]), name


class Shrinking(Wrapper):
    """Shrinks its tables itself, from its third batch on."""

    def forward(self, dense, sparse):
        self.calls += 1
        if self.calls > 2:
            with torch.no_grad():
                for name, weights in self.inner.named_parameters():
                    if ".embedding_bags." in name:
                        weights.mul_(0.5)
        return self.inner(dense, sparse)


@pytest.mark.parametrize("in_evaluation", [False, True])
def test_rows_that_the_model_itself_changes_are_told(in_evaluation, shard_model, make_batch):
    batches = [make_batch(16, seed) for seed in range(4)]
    model = Shrinking(click_model(shard_model))
    schedule = Prefetch(model)
    for number in range(2):
        schedule.step(batches[number], lambda count, number=number: batches[number + 1 :][:count])
    if in_evaluation:
        with torch.no_grad():
            model(batches[3].dense, batches[3].sparse)
    with pytest.raises(ValueError, match=r"changed outside of the backward pass, .*train.pipeline=ids"):
        schedule.step(batches[2], lambda count: batches[3:])


class Overwriting(Wrapper):
    """Writes into the ids of its batch from its third call on, in a way that PyTorch does not count."""

    def forward(self, dense, sparse):
        self.calls += 1
        if self.calls > 2:
            sparse.values().numpy()[::3] = 0
        return self.inner(dense, sparse)


@pytest.mark.parametrize("make", [Prefetch, PrefetchIds])
def test_ids_that_the_model_changes_unseen_are_told(make, shard_model, make_batch):
    batches = [make_batch(16, seed) for seed in range(4)]
    schedule = make(Overwriting(click_model(shard_model)))
    for number in range(2):
        schedule.step(batches[number], lambda count, number=number: batches[number + 1 :][:count])
    with pytest.raises(ValueError, match=r"changed ids of its batch .*choose train\.pipeline=none"):
        schedule.step(batches[2], lambda count: batches[3:])


def test_weights_that_are_no_numbers_count_as_unchanged(make_batch):
    sparse = make_batch(4, 0).sparse
    weights = torch.full(sparse.values().shape, torch.nan)
    weighted = KeyedJaggedTensor(sparse.keys(), sparse.values(), weights, sparse.lengths())
    assert SentIds(weighted).are(weighted)


@pytest.mark.parametrize("wrapper", [Whimsical, Transforming])
def test_halves_of_a_batch_need_one_call_with_its_ids(wrapper, shard_model, make_batch):
    schedule = Waves(wrapper(click_model(shard_model)))
    schedule.step(make_batch(16, 0), lambda count: [])
    with pytest.raises(ValueError, match=r"waves updates tables once for both halves .* choose prefetch"):
        schedule.step(make_batch(16, 1), lambda count: [])


def test_collections_that_are_given_other_ids_do_not_work_ahead(shard_model, make_batch):
    model = click_model(shard_model)
    transforming = Transforming(model)
    schedule = Prefetch(transforming)
    batches = [make_batch(8, seed) for seed in range(3)]
    for number, batch in enumerate(batches):
        schedule.step(batch, lambda count, number=number: batches[number + 1 :][:count])
    assert schedule.collections == []


def test_evaluation_between_batches_looks_up_its_own_ids(shard_model, make_batch):
    model = click_model(shard_model)
    batches = [make_batch(8, seed) for seed in range(4)]
    schedule = Prefetch(model)
    for number in range(3):
        schedule.step(batches[number], lambda count, number=number: batches[number + 1 :][:count])
    assert isinstance(batches[3], Batch)
    model.eval()
    with torch.no_grad():
        logits = model(batches[3].dense, batches[3].sparse)  # although this batch is being worked ahead on
    model.train()
    assert torch.equal(logits, schedule.step(batches[3], lambda count: []).logits)
