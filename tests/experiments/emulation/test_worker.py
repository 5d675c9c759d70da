from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.recovery.restore.pls_budget import pls_added
from data.dataset import read_manifest
from data.synthetic import SyntheticConfig, generate
from dlrm.launch.device import Ranks
from dlrm.training.data import prepare
from experiments.emulation import worker as emulation_worker
from experiments.emulation.data import Ids
from experiments.emulation.emulation import NODES, JobEvent, Run, events_of, rows_of_node
from experiments.emulation.worker import EmulatedNodes, EmulatedWorkload, emulate
from experiments.harness.training import Training

pytestmark = pytest.mark.system

STEPS = 8


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    generate(SyntheticConfig(rows_per_day=STEPS * 256, days=2), folder)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield EmulatedWorkload(dataset=str(folder), batch_size=256, covering=0.9)
    dist.destroy_process_group()


@contextmanager
def training(run, workload):
    inputs = prepare(emulation_worker._config(run, workload), "tiny", Ranks(0, 0, 1))
    try:
        ids = Ids(inputs.manifest.features)
        made = Training(inputs, ids.training(inputs.loader))
        made.test = partial(emulation_worker._test, made.model, ids, inputs, workload)
        yield made
    finally:
        inputs.close()


@contextmanager
def cluster(run, workload, tmp_path):
    with training(run, workload) as trained:
        made = EmulatedNodes(run, trained, tmp_path / "checkpoint", workload, STEPS)
        try:
            yield made, trained
        finally:
            made.close()


def copies(made):
    return {
        shard.name: {name: values.clone() for name, values in shard.columns.items()}
        for shard in made._checkpointer.shards
    }


def same(left, right):
    return (left == right).reshape(len(left), -1).all(1)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_lost_rows_are_as_they_were_saved_and_others_as_they_are(workload, tmp_path, optimizer):
    run = Run(scheme="vanilla", seed=0, optimizer=optimizer)
    with cluster(run, workload, tmp_path) as (made, trained):
        trained.timed_steps(2)
        made.play(JobEvent(10.0))
        saved = copies(made)
        trained.timed_steps(3)
        live = copies(made)
        made.play(JobEvent(20.0, nodes=(1, 6)))
        now = copies(made)
        for shard in made._checkpointer.shards:
            lost = torch.zeros(shard.num_rows, dtype=torch.bool)
            for node in (1, 6):
                lost[slice(*rows_of_node(node, shard.num_rows))] = True
            for name, values in now[shard.name].items():
                assert torch.equal(values[lost], saved[shard.name][name][lost])
                assert torch.equal(values[~lost], live[shard.name][name][~lost])
        assert any(not torch.equal(now[name]["weights"], live[name]["weights"]) for name in now), (
            "something was lost"
        )


def test_each_lost_row_has_its_own_last_saved_version(workload, tmp_path):
    run = Run(scheme="mfu", seed=0, ratio=0.02)
    with cluster(run, workload, tmp_path) as (made, trained):
        versions = [copies(made)]  # the state at step 0
        newest = {
            shard.name: torch.zeros(shard.num_rows, dtype=torch.int64) for shard in made._checkpointer.shards
        }
        for number in (1, 2, 3):
            trained.timed_steps(2)
            chosen = made._prioritizer.rows_to_save()
            made._prioritizer.take_back()
            made.play(JobEvent(float(number)))
            versions.append(copies(made))
            for name, rows in chosen.items():
                newest[name][rows] = number
        trained.timed_steps(1)
        live = copies(made)
        made.play(JobEvent(30.0, nodes=(3,)))
        mixed = 0
        for shard in made._checkpointer.shards:
            lost = slice(*rows_of_node(3, shard.num_rows))
            for column, values in shard.columns.items():
                expected = torch.stack([version[shard.name][column] for version in versions])
                rows = torch.arange(shard.num_rows)
                expected = expected[newest[shard.name], rows]
                assert same(values, expected)[lost].all()
                kept = torch.ones(shard.num_rows, dtype=torch.bool)
                kept[lost] = False
                assert torch.equal(values[kept], live[shard.name][column][kept])
            mixed = max(mixed, len(newest[shard.name][lost].unique()))
        assert mixed >= 3, "rows of several saves came back"


def test_full_recovery_ends_as_the_run_without_failures(workload, tmp_path):
    run = Run(scheme="none", seed=5)
    with training(run, workload) as undisturbed:
        undisturbed.timed_steps(STEPS)
        expected = undisturbed.test()
    with training(run, workload) as trained:
        batches = list(trained.batches)
        trained.batches = iter(batches)
        with Checkpointer(trained.model, CheckpointConfig(uri=str(tmp_path))) as checkpointer:
            checkpointer.register("optimizers", trained.optimizers)
            trained.timed_steps(3)
            checkpointer.save("consistent")
            checkpointer.wait()
            trained.timed_steps(3)
            checkpointer.load()
        trained.steps_done, trained.batches = 3, iter(batches[3:])
        trained.timed_steps(STEPS - 3)
        assert trained.test() == expected
    assert emulate(run, workload)["auc"] == expected["auc"]


def test_a_run_with_failures(workload):
    run = Run(scheme="vanilla", seed=2, target_pls=0.05, failures=3)
    row = emulate(run, workload)
    steps = [(event.hour * STEPS / 56, event.nodes) for event in events_of(run)]
    saved, pls = 0, 0.0
    for step, nodes in steps:
        if nodes:
            pls += pls_added(dict.fromkeys(nodes, 1.0), int(step), saved, STEPS, NODES)
        else:
            saved = int(step + 1e-9)
    assert row["pls"] == pytest.approx(pls)
    assert row["pls"] > 0
    assert (row["steps"], row["saves"]) == (STEPS, sum(not nodes for _, nodes in steps))
    rows = sum(feature.rows for feature in read_manifest(workload.dataset).features)
    assert row["rows_saved"] == rows * row["saves"]
    assert row == {**emulate(run, workload), "seconds": row["seconds"]}, "a run can be repeated"
    assert row["auc"] != emulate(run.without_failures, workload)["auc"]


def test_a_node_that_fails_again_loses_no_sample_twice(workload, tmp_path):
    run = Run(scheme="vanilla", seed=0)
    with cluster(run, workload, tmp_path) as (made, trained):
        trained.timed_steps(4)
        made.play(JobEvent(28.0, nodes=(1,)))
        made.play(JobEvent(28.1, nodes=(1,)))
        assert made.pls == pytest.approx(0.5 / NODES)
        made.play(JobEvent(28.2, nodes=(2,)))
        assert made.pls == pytest.approx(1.0 / NODES)
        trained.timed_steps(1)
        made.play(JobEvent(35.0, nodes=(1,)))
        assert made.pls == pytest.approx((1.0 + 1 / 8) / NODES)
        trained.timed_steps(1)
        made.play(JobEvent(42.0, nodes=(1,)))
        assert made.pls == pytest.approx((1.0 + 2 / 8) / NODES)


def test_rows_that_do_not_come_back_end_the_run(workload, monkeypatch):
    monkeypatch.setattr(Checkpointer, "load_shards", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"not all rows of the nodes \(6,\) came back"):
        emulate(Run(scheme="vanilla", seed=0), workload)


@pytest.mark.parametrize(
    "scheme", ["naive", "ssu", "scar", "mru", "random", "round_robin", "touched", "never"]
)
def test_every_scheme_runs(workload, scheme):
    row = emulate(Run(scheme=scheme, seed=1, failures=1), workload)
    assert 0.4 < row["auc"] < 0.9
    assert all(0.3 < row[f"auc_{part}"] < 0.9 for part in ("head", "torso", "tail"))


@pytest.mark.parametrize("has_memory", [True, False])
def test_nothing_is_left_behind(workload, tmp_path, monkeypatch, has_memory):
    memory = tmp_path / "memory"
    if has_memory:
        memory.mkdir()
    monkeypatch.setattr(emulation_worker, "MEMORY", memory)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []
    play = EmulatedNodes.play
    monkeypatch.setattr(
        EmulatedNodes,
        "play",
        lambda *arguments: (play(*arguments), seen.extend(tmp_path.rglob("checkpoint"))),
    )
    emulate(Run(scheme="vanilla", seed=0), workload)
    assert {path.is_relative_to(memory) for path in seen} == {has_memory}
    assert not list(tmp_path.rglob("cpr-emulation-*"))
