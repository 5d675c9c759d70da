"""Prioritizers with real models and real saves."""

import math

import pytest
import torch

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.priority import Prioritizer, PriorityConfig
from cpr.priority.config import SCHEMES
from cpr.priority.frequency import FrequencyTracker
from cpr.shards import find_shards
from tests.cpr.priority.groups import zeros
from tests.cpr.shards.models import DIM, bags, batch, sequences, shard

ROWS = {"a": 40, "b": 30, "c": 24, "d": 20, "e": 3}
LAYOUT = {"a": "tw", "b": "cw", "c": "rw", "d": "dp", "e": "tw"}
SMALL = "bags.embedding_bags.e/r0-c0"
COPIED = "bags.embedding_bags.d/r0-c0"
WHOLE = {SMALL, COPIED}
"""Shards that are saved whole."""
RATIO = 0.2


def make(model, scheme="mfu", **options):
    return Prioritizer(model, PriorityConfig(scheme=scheme, ratio=RATIO, covering=0.97), **options)


def train(model, step):
    """Train one step; returns its lookups of each table."""
    features = batch(step, 6, **ROWS)
    model({"bags": features}).square().sum().backward()
    return {name: features[f"f_{name}"].values() for name in ROWS}


def table_of(name):
    return name.partition("/")[0].rpartition(".")[2]


@pytest.fixture
def model(world_of_one):
    return shard(LAYOUT, bags=bags(**ROWS))


@pytest.fixture
def prioritizer(model):
    """A prioritizer of the model that knows all changes."""
    with make(model) as made:
        made.forget_all()
        yield made


@pytest.mark.parametrize("kind", [bags, sequences])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_saves_with_a_checkpointer(world_of_one, kind, scheme, tmp_path):
    """Loaded rows are the last saved ones."""
    # FBGEMM looks no rows of replicated tables up on the CPU without pooling them
    model = shard(LAYOUT if kind is bags else {**LAYOUT, "d": "rw"}, bags=kind(**ROWS))
    whole = {"e", "d"} if kind is bags else {"e"}
    with Checkpointer(model, CheckpointConfig(uri=str(tmp_path))) as checkpointer:
        prioritizer = make(model, scheme, shards=checkpointer.shards)
        assert not prioritizer.is_complete
        prioritizer.begin_full_save()
        checkpointer.save("consistent")
        checkpointer.wait()
        prioritizer.confirm()
        assert prioritizer.is_complete
        expected = {found.name: found.weights.clone() for found in checkpointer.shards}
        for step in range(3):
            train(model, step)
            checkpointer.step()
            rows = prioritizer.rows_to_save()
            for found in checkpointer.shards:
                local = rows[found.name] - found.row_offset
                expected[found.name][local] = found.weights[local]
                budget = math.ceil(RATIO * found.num_rows)
                assert local.numel() <= budget or scheme == "touched" or found.table_name in whole
            checkpointer.save_rows(rows)
            checkpointer.wait()
            prioritizer.confirm()
        live = {found.name: found.weights.clone() for found in checkpointer.shards}
        prioritizer.close()
        checkpointer.load()
        for found in checkpointer.shards:
            assert torch.equal(found.weights, expected[found.name]), found.name
            if scheme == "touched":
                assert torch.equal(found.weights, live[found.name]), "an incremental save misses nothing"


def test_tables_of_ordinary_optimizers_are_saved_whole(world_of_one):
    """Adam's momentum changes rows of data-parallel tables without lookups."""
    rows = {"d": 40, "e": 30, "f": 20}
    model = shard({"d": "dp", "e": "unfused", "f": "tw"}, bags=bags(**rows))
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.numel()], lr=0.1)
    everything = PriorityConfig(scheme="touched", ratio=RATIO, covering=1.0)
    with Prioritizer(model, everything, [optimizer]) as prioritizer:
        prioritizer.forget_all()
        before = {}
        for step in range(2):
            before = {found.name: found.weights.clone() for found in find_shards(model)}
            prioritizer.rows_to_save()  # the lookups of the first step are saved before the second
            prioritizer.confirm()
            optimizer.zero_grad()
            model({"bags": batch(step, 2, **rows)}).square().sum().backward()
            optimizer.step()
        chosen = prioritizer.rows_to_save()
    for found in find_shards(model):
        moved = (found.weights != before[found.name]).any(1).nonzero().view(-1).tolist()
        assert moved
        assert set(moved) <= set(chosen[found.name].tolist()), found.name


def test_forgotten_rows_are_not_saved(model, prioritizer):
    train(model, 0)
    name = "bags.embedding_bags.a/r0-c0"
    before = prioritizer.rows_to_save()[name].tolist()
    prioritizer.take_back()
    prioritizer.forget(name, [(before[0], before[0] + 1), (before[1], before[2])])
    after = prioritizer.rows_to_save()[name].tolist()
    assert before[0] not in after
    assert before[1] not in after
    assert before[2] in after
    prioritizer.take_back()
    prioritizer.forget(name)
    rows = prioritizer.rows_to_save()
    assert rows[name].numel() == 0
    assert rows["bags.embedding_bags.c/r0-c0"].numel()
    prioritizer.take_back()
    prioritizer.forget(SMALL)  # a table that is always saved whole
    prioritizer.forget_all()
    rows = prioritizer.rows_to_save()
    assert {name for name, chosen in rows.items() if chosen.numel()} == WHOLE


def test_failed_full_save_must_be_repeated(model):
    with make(model) as prioritizer:
        with pytest.raises(ValueError, match="a full save must come first"):
            prioritizer.rows_to_save()
        prioritizer.begin_full_save()
        with pytest.raises(ValueError, match="a save is running"):
            prioritizer.doubt()
        prioritizer.take_back()
        assert not prioritizer.is_complete
        prioritizer.begin_full_save()
        train(model, 0)
        prioritizer.confirm()
        assert prioritizer.is_complete
        name = "bags.embedding_bags.a/r0-c0"
        assert prioritizer.rows_to_save()[name].numel(), "lookups during the save count for the next one"
        prioritizer.take_back()
        prioritizer.doubt()
        assert not prioritizer.is_complete


def test_wrong_order_of_calls_is_refused(prioritizer):
    for end in (prioritizer.confirm, prioritizer.take_back):
        with pytest.raises(ValueError, match="no save is running"):
            end()
    prioritizer.rows_to_save()
    for begin in (prioritizer.rows_to_save, prioritizer.begin_full_save, prioritizer.forget_all):
        with pytest.raises(ValueError, match=r"confirm\(\) or take_back\(\) it first"):
            begin()
    with pytest.raises(ValueError, match="a save is running"):
        prioritizer.forget(SMALL)
    prioritizer.confirm()
    with pytest.raises(ValueError, match=r"no shard 'x'; it has bags\.embedding_bags\.a/r0-c0"):
        prioritizer.forget("x")
    with pytest.raises(ValueError, match=r"rows 0 to 3 were named of .* holds rows 0 to 2"):
        prioritizer.forget(SMALL, [(0, 4)])


@pytest.fixture
def allocate():
    """An allocator of memory that survives workers."""
    memory = {}
    return lambda name, dtype, numel: memory.setdefault(name, zeros(name, dtype, numel))


def test_trackers_survive_a_worker(model, allocate):
    with make(model, allocate=allocate) as first:
        first.forget_all()
        train(model, 0)
        expected = first.rows_to_save()  # this save is running when the worker dies
    with make(model, allocate=allocate) as second:
        assert second.is_complete
        found = second.rows_to_save()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        second.confirm()
        second.begin_full_save()
    with make(model, allocate=allocate) as third:
        assert not third.is_complete, "the running full save may not have been committed"


def test_worker_that_dies_at_the_start_of_a_full_save_leaves_invalid_trackers(model, allocate, monkeypatch):
    def die(*_):
        raise KeyboardInterrupt

    with make(model, allocate=allocate) as first:
        first.forget_all()
        train(model, 0)
        forget = FrequencyTracker.forget
        monkeypatch.setattr(FrequencyTracker, "forget", lambda *args: (forget(*args), die()))
        with pytest.raises(KeyboardInterrupt):
            first.begin_full_save()
        monkeypatch.undo()
    with make(model, allocate=allocate) as second:
        assert not second.is_complete


@pytest.mark.parametrize("scheme", ["ssu", "random", "round_robin"])
def test_state_is_restored(model, scheme):
    with make(model, scheme) as first, make(model, scheme) as second, make(model, "mfu") as other:
        for prioritizer in (first, second):
            prioritizer.forget_all()
        first.rows_to_save()
        first.confirm()
        second.load_state_dict(first.state_dict())
        assert second.state_dict().keys() == first.state_dict().keys()
        expected, found = first.rows_to_save(), second.rows_to_save()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        other.load_state_dict(first.state_dict())  # state of another scheme is ignored


@pytest.mark.parametrize("scheme", ["ssu", "random", "round_robin"])
@pytest.mark.parametrize(
    "changed",
    [{"layout": {**LAYOUT, "a": "cw", "b": "tw"}}, {"covering": 1.0}, {"ratio": 0.1}],
    ids=["another plan", "more tables", "fewer rows"],
)
def test_state_of_other_tables_is_ignored(model, scheme, changed):
    options = {"ratio": RATIO, "covering": 0.97, **changed}
    layout = options.pop("layout", LAYOUT)
    with make(model, scheme) as before:
        before.forget_all()
        train(model, 0)
        before.rows_to_save()
        before.confirm()
        state = before.state_dict()
    other = shard(layout, bags=bags(**ROWS))
    config = PriorityConfig(scheme=scheme, **options)
    with Prioritizer(other, config) as found, Prioritizer(other, config) as fresh:
        found.load_state_dict(state)
        for prioritizer in (found, fresh):
            prioritizer.forget_all()
        train(other, 1)
        chosen, expected = found.rows_to_save(), fresh.rows_to_save()
        for name in expected:
            assert table_of(name) != "a" or torch.equal(chosen[name], expected[name])


def test_closed_prioritizer_ignores_lookups(model, prioritizer):
    prioritizer.close()
    train(model, 0)
    rows = prioritizer.rows_to_save()
    assert {name for name, chosen in rows.items() if chosen.numel()} == WHOLE


@pytest.mark.parametrize(
    ("scheme", "bytes_per_row"),
    [("mfu", 4), ("ssu", 4 * RATIO), ("scar", 4 * DIM), ("mru", 4), ("touched", 1), ("never", 0)],
)
def test_tracker_bytes(world_of_one, scheme, bytes_per_row):
    model = shard({"a": "tw", "b": "tw"}, bags=bags(a=1000, b=500))
    with make(model, scheme) as prioritizer:
        assert prioritizer.tracker_bytes == pytest.approx(bytes_per_row * 1500, abs=4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scheme", ["mfu", "ssu", "scar", "mru", "touched"])
def test_rows_chosen_on_a_gpu(world_of_one, scheme):
    """The same rows are chosen as on the CPU; of SSU, about as many, as slots collide."""
    chosen = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        torch.manual_seed(1)
        model = shard({"a": "tw", "b": "rw"}, device=device, bags=bags(a=400, b=300))
        for found in find_shards(model):
            found.weights.fill_(0.5)
        with make(model, scheme) as prioritizer:
            prioritizer.forget_all()
            for step in range(3):
                features = batch(step, 6, a=400, b=300).to(device)
                model.module.bags(features).values().sum().backward()
            chosen.append(prioritizer.rows_to_save())
    on_cpu, on_gpu = chosen
    for name, rows in on_cpu.items():
        if scheme == "ssu":
            assert abs(rows.numel() - on_gpu[name].numel()) <= 3
        else:
            assert torch.equal(rows, on_gpu[name]), name
