"""Runs built from a configuration: parts, resume, warm start."""

import json
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cpr.errors import LockedError, MismatchError, NothingSavedError
from cpr.shards import find_shards, table_groups
from data.synthetic import SyntheticConfig, generate
from dlrm.comm.controllers.selsync import SelSync
from dlrm.comm.feedback import Residual
from dlrm.config.recipe import load_config
from dlrm.config.schema import ModelConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.p3 import P3Sync
from dlrm.dense_sync.selective import SelectiveSync
from dlrm.launch.device import Ranks
from dlrm.launch.stop_signal import StopSignal
from dlrm.models.build import build_model
from dlrm.sharding.host_lookup import HostLookup, ReplicatedLookup
from dlrm.training import build as module
from dlrm.training.build import build, start_process_group
from dlrm.training.data import prepare
from dlrm.training.model import move_dense
from dlrm.training.trainer import DivergedError

ALONE = Ranks(rank=0, local_rank=0, world_size=1)
CPU = torch.device("cpu")


def test_a_process_without_torchrun_has_a_group_of_one(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    start_process_group(ALONE, CPU)
    try:
        assert dist.get_world_size() == 1
        values = torch.ones(3)
        dist.all_reduce(values)
        assert values.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def test_deepfm_rounds_embeddings_but_not_the_linear_part(shard_model):
    """Each collection of tables puts out the dtype that its model asked for."""
    model = shard_model(
        {"cat_0": "data_parallel", "wide_cat_0": "data_parallel"},
        model=ModelConfig(kind="deepfm", embedding_dim=8, top_mlp=(8, 1)),
        precision="bf16",
    )
    for collection, dtype in ((model.module.sparse, torch.bfloat16), (model.module.wide, torch.float32)):
        lookups = [group.emb_module.forward for group in table_groups(collection)]
        assert {type(lookup) for lookup in lookups} == {HostLookup, ReplicatedLookup}
        bags = [lookup.bags if isinstance(lookup, HostLookup) else lookup._bags for lookup in lookups]
        assert {bag.output_dtype for bag in bags} == {dtype}


@pytest.fixture(scope="module")
def tomorrow(tmp_path_factory):
    """Data of the same tables, other samples."""
    folder = tmp_path_factory.mktemp("data") / "tomorrow"
    generate(
        SyntheticConfig(scale=1e-4, days=2, rows_per_day=384, rows_per_block=384, rows_per_file=384, seed=5),
        folder,
    )
    return folder


@pytest.fixture
def inputs(world_of_one, small_dataset, tmp_path):
    made = []

    def work(*overrides, resume=None):
        settings = [f"data.uri={small_dataset}", "data.global_batch_size=32"]
        config = load_config("tiny", [*settings, f"train.run_folder={tmp_path / 'runs'}", *overrides])
        made.append(prepare(config, "tiny", ALONE, resume))
        return made[-1]

    yield work
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("overrides", "total"),
    [((), 512), (("train.epochs=3",), 3 * 512), (("train.max_steps=5", "train.epochs=3"), 5 * 32)],
)
def test_telemetry_knows_the_length_of_the_run_and_the_best_auc(inputs, overrides, total, monkeypatch):
    told = {}
    monkeypatch.setattr(module, "open_telemetry", lambda rank, folder, **options: told.update(options))
    build(inputs(*overrides), StopSignal())
    assert told["total_samples"] == total
    assert 0.6 < told["best_auc"] < 1


@pytest.mark.parametrize(
    ("precision", "dtypes", "warnings"),
    [
        ("bf16", {torch.float32}, 1),
        ("bf16", {torch.float32, torch.bfloat16}, 0),
        ("fp32", {torch.float32}, 0),
    ],
)
def test_slow_mixed_precision_is_warned_of(inputs, precision, dtypes, warnings, monkeypatch, caplog):
    monkeypatch.setattr(module, "ONEDNN_DTYPES", dtypes)
    monkeypatch.setattr(module, "open_telemetry", lambda rank, folder, **options: None)
    with caplog.at_level("WARNING", "dlrm"):
        build(inputs(f"train.precision={precision}"), StopSignal())
    assert sum("train.precision=fp32 is faster" in record.message for record in caplog.records) == warnings


def test_the_best_auc_of_real_data_or_of_several_days_is_unknown():
    days = {"1": {"best_auc": 0.8}, "2": {"best_auc": 0.7}}
    known = SimpleNamespace(days=(2,), provenance={"days": days})
    assert module._best_auc(known) == 0.7
    assert module._best_auc(SimpleNamespace(days=(1, 2), provenance={"days": days})) is None
    assert module._best_auc(SimpleNamespace(days=(2,), provenance={})) is None


def test_a_run_folder_that_cannot_be_made_is_a_mistake_on_all_ranks(inputs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="run"):
        build(inputs(f"train.run_folder={tmp_path / 'file'}"), StopSignal())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_dense_part_moves_to_a_gpu_and_tables_wait_to_be_sharded(features):
    model = build_model(ModelConfig(kind="dcnv2"), features, 13, torch.float32)
    tables = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    move_dense(model, torch.device("cuda", 0))
    devices = {name: parameter.device.type for name, parameter in model.named_parameters()}
    assert [name for name, device in devices.items() if device == "meta"] == tables
    assert {device for name, device in devices.items() if name not in tables} == {"cuda"}


@pytest.mark.parametrize(
    ("override", "kind", "own"),
    [
        ("comm.exchange=dense", AllReduceSync, None),
        ("comm.exchange=hi_topk", AllReduceSync, Residual),
        ("comm.exchange=priority", P3Sync, None),
        ("comm.exchange=selsync", SelectiveSync, SelSync),
    ],
)
def test_the_dense_synchronization_is_the_configured_one(override, kind, own, inputs):
    """And what that needs is saved: with the trainer what ranks have in common, the rest for each rank."""
    trainer = build(inputs(override, "checkpoint.every_steps=5"), StopSignal())
    trainer.telemetry.close()
    trainer.replicas.close()
    assert type(trainer.replicas) is kind
    registered = trainer.session._checkpointer.state
    assert isinstance(registered._own.get("replica"), own or type(None))
    assert trainer.state_dict()["replicas"] == trainer.replicas.state_dict()
    trainer.load_state_dict(trainer.state_dict())
    trainer.load_state_dict({"steps_done": 1, "samples_done": 2})  # of a run that is older than exchanges
    trainer.session.close()


def test_random_k_with_momentum_is_warned_of(inputs, monkeypatch, caplog):
    monkeypatch.setattr(module, "open_telemetry", lambda rank, folder, **options: None)
    options = ("comm.exchange=all_gather", "comm.compressor=random", "dense.optimizer=lars")
    with caplog.at_level("WARNING", "dlrm"):
        build(inputs(*options), StopSignal())
    assert sum("may diverge" in record.message for record in caplog.records) == 1


@contextmanager
def built(inputs):
    trainer = build(inputs, StopSignal())
    with closing(trainer.replicas), closing(trainer.session), closing(trainer.telemetry):
        yield trainer


def spoil_in_step_4(trainer, what):
    """Rows as they are when the step begins, or parameters in its update."""
    begin_step, step = trainer.optimizers.begin_step, trainer.optimizers.step

    def begin(number):
        begin_step(number)
        if number == 3 and what == "rows":
            trainer.session._checkpointer.wait_until_idle()  # or it is of no more use to the save of step 3
            for shard in find_shards(trainer.model):
                shard.weights.fill_(torch.nan)

    def update():
        step()
        if trainer.steps_done == 3 and what == "parameters":
            next(iter(trainer._dense.values())).data.fill_(torch.nan)

    trainer.optimizers.begin_step, trainer.optimizers.step = begin, update


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["rows", "parameters"])
def test_nan_ends_the_run_before_it_is_saved(inputs, what, precision):
    options = ("checkpoint.every_steps=1", "train.log_every_steps=1000", f"train.precision={precision}")
    with built(inputs(*options)) as trainer:
        spoil_in_step_4(trainer, what)
        with pytest.raises(DivergedError, match="at step 4 " if what == "rows" else "after step 4,"):
            trainer.train()
        assert trainer.session._checkpointer.newest_step == 3


def test_a_refused_resume_leaves_the_run_folder_unchanged(inputs, tmp_path):
    options = ("checkpoint.every_steps=2", "train.max_steps=4", "train.log_every_steps=1")
    with built(inputs(*options)) as trainer:
        trainer.train()
    (folder,) = (tmp_path / "runs").iterdir()
    names = ("config.json", "versions.json", "metrics.jsonl")
    before = {name: (folder / name).read_bytes() for name in names}
    mistake = pytest.raises(MismatchError, match="this data position has seed 0, but the loader has 7")
    with built(inputs(*options, "train.seed=7", resume=folder)) as trainer, mistake:
        trainer.train()
    with built(inputs(*options, resume=folder)) as living:
        living.session._checkpointer.claim()
        with built(inputs(*options, "train.max_steps=5", resume=folder)) as late, pytest.raises(LockedError):
            late.train()
    assert {name: (folder / name).read_bytes() for name in names} == before
    with built(inputs(*options, "train.max_steps=5", resume=folder)) as trainer:
        trainer.train()
    assert (folder / "config.json").read_bytes() != before["config.json"]


def values_of(trainer):
    """Copies of tables with their optimizer state, dense parameters and the state of their optimizer."""
    tables = {
        f"{shard.name}/{name}": column.clone()
        for shard in find_shards(trainer.model, trainer.optimizers.table_optimizers)
        for name, column in shard.columns.items()
    }
    dense = {name: each.detach().clone() for name, each in trainer._dense.items()}
    state = trainer.optimizers.dense.state_dict()["state"].values()
    return {**tables, **dense, **{f"sum {at}": each["sum"].clone() for at, each in enumerate(state)}}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_warm_start_takes_the_model_and_starts_at_its_own_data(inputs, tmp_path, tomorrow, caplog):
    options = ("checkpoint.every_steps=8", "schedule.warmup_steps=100", "train.max_steps=10")
    with built(inputs(*options)) as trainer:
        trainer.train()
        before = values_of(trainer)
    (old,) = (tmp_path / "runs").iterdir()

    refused = pytest.raises(
        MismatchError, match=r"this data position has num_rows 512, .* --warm-start RUN_FOLDER"
    )
    with built(inputs(*options, f"data.uri={tomorrow}", resume=old)) as trainer, refused:
        trainer.train()

    options = (*options, f"data.uri={tomorrow}", f"train.warm_start={old}/checkpoint")
    with built(inputs(*options)) as trainer, caplog.at_level("INFO", "dlrm"):
        trainer.session.restore()
        assert_equal(values_of(trainer), before)
        assert (trainer.steps_done, trainer.samples_done, trainer.loader.steps_left) == (0, 0, 12)
        trainer.optimizers.begin_step(trainer.steps_done)
        assert trainer.optimizers.learning_rates["dense"] == pytest.approx(0.02 * 11 / 100)
    assert f"continue from save 1, step 10, of {old}/checkpoint" in caplog.text
    assert f"the data starts over, with day 0 of {tomorrow}" in caplog.text

    (new,) = set((tmp_path / "runs").iterdir()) - {old}  # it has saved nothing: it begins so again
    with built(inputs(*options, resume=new)) as trainer:
        trainer.session.restore()
        assert_equal(values_of(trainer), before)
    with built(inputs(*options, resume=new)) as trainer:
        trainer.train()
        assert (trainer.steps_done, trainer.session._checkpointer.newest_step) == (10, 10)
        after = values_of(trainer)
    with built(inputs(*options, resume=new)) as trainer:  # now it goes on from its own
        trainer.session.restore()
        assert trainer.steps_done == 10
        assert_equal(values_of(trainer), after)
        trainer.optimizers.begin_step(trainer.steps_done)
        assert trainer.optimizers.learning_rates["dense"] == pytest.approx(0.02 * 21 / 100)


def test_a_warm_start_needs_a_save_of_the_other_run(inputs, tmp_path):
    missing = pytest.raises(NothingSavedError, match="a warm start needs a run that has saved")
    with built(inputs(f"train.warm_start={tmp_path}/nothing")) as trainer, missing:
        trainer.train()


def kinds_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["kind"], line["step"]) for line in lines]


def test_saves_are_recorded_and_a_finished_run_writes_nothing_more(inputs, tmp_path):
    options = ("checkpoint.every_steps=2", "train.max_steps=3", "train.log_every_steps=1")
    with built(inputs(*options)) as trainer:
        trainer.train()
        trainer.telemetry.finish()
    (folder,) = (tmp_path / "runs").iterdir()
    recorded = kinds_of(folder)
    assert recorded[0] == ("hyperparameters", 0)
    assert [step for kind, step in recorded if kind == "save"] == [2, 3]
    report, saves = (folder / "report.json").read_bytes(), sorted((folder / "checkpoint").glob("saves/*"))
    with built(inputs(*options, resume=folder)) as trainer:
        trainer.train()
        assert trainer.telemetry.finish().metrics is not None
    assert sorted((folder / "checkpoint").glob("saves/*")) == saves
    assert (folder / "report.json").read_bytes() == report
    assert [step for kind, step in kinds_of(folder) if kind == "save"] == [2, 3]
    with built(inputs(*options, "train.max_steps=4", resume=folder)) as trainer:
        trainer.train()
        trainer.telemetry.finish()
    assert [step for kind, step in kinds_of(folder) if kind == "save"] == [2, 3, 4]
    assert (folder / "report.json").read_bytes() != report
