"""Runs built from a configuration: parts, resume, warm start."""

import json
import re
import shutil
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial

import polars  # noqa: F401  # sets an environment variable when it is first imported
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.utils import add_params_from_parameter_sharding, convert_to_fbgemm_types

from cpr import Changes
from cpr.errors import LockedError, MismatchError, NothingSavedError
from cpr.shards import find_shards, table_groups
from data.criteo import DENSE_NAMES
from data.dataset import MANIFEST_NAME
from data.synthetic import SyntheticConfig
from dlrm.comm.controllers.selsync import SelSync
from dlrm.comm.feedback import Residual
from dlrm.config.recipe import load_config
from dlrm.config.schema import ModelConfig, ShardingConfig, TablesConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.delayed import DelayedSync, LocalGradients
from dlrm.dense_sync.p3 import P3Sync
from dlrm.dense_sync.selective import SelectiveSync
from dlrm.launch.device import Ranks
from dlrm.launch.stop_signal import StopSignal
from dlrm.models.build import build_model
from dlrm.sharding import tables
from dlrm.sharding.host_lookup import HostLookup, ReplicatedLookup
from dlrm.sharding.plan import make_plan, make_sharder
from dlrm.sharding.splitting.operator_tables import _plan_next_to
from dlrm.training import build as module
from dlrm.training.build import build, start_process_group
from dlrm.training.data import prepare
from dlrm.training.model import move_dense, set_output_dtypes
from dlrm.training.run import _train
from dlrm.training.trainer import DivergedError
from tests.datasets import generate_few

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
        {"cat_0": "data_parallel", "linear_cat_0": "data_parallel"},
        model=ModelConfig(kind="deepfm", embedding_dim=8, top_mlp=(8, 1)),
        precision="bf16",
    )
    for collection, dtype in ((model.module.sparse, torch.bfloat16), (model.module.wide, torch.float32)):
        lookups = [group.emb_module.forward for group in table_groups(collection)]
        assert {type(lookup) for lookup in lookups} == {HostLookup, ReplicatedLookup}
        bags = [lookup.bags if isinstance(lookup, HostLookup) else lookup._bags for lookup in lookups]
        assert {bag.output_dtype for bag in bags} == {dtype}


def test_on_a_gpu_embeddings_are_rounded_but_not_the_linear_part(world_of_one, features):
    """FBGEMM gets the dtypes from the plan, whether heads or their tables are planned."""
    config = ModelConfig(kind="deepfm", embedding_dim=8, top_mlp=(8, 1))
    model = build_model(config, features, DENSE_NAMES, torch.bfloat16)
    plan = make_plan(model, make_sharder(TablesConfig()), ShardingConfig(), CPU, 16)
    plan.plan["sparse"] = plan.plan.pop("sparse.tables")
    set_output_dtypes(model, plan)

    def dtypes(path):
        found = [add_params_from_parameter_sharding({}, each) for each in plan.plan[path].values()]
        return {convert_to_fbgemm_types(each).get("output_dtype", SparseType.FP32) for each in found}

    assert dtypes("sparse") == {SparseType.BF16}
    assert dtypes("wide.tables") == {SparseType.FP32}
    plan.plan["weights"] = {name: _plan_next_to(each, 8, 4) for name, each in plan.plan["sparse"].items()}
    assert dtypes("weights") == {SparseType.FP32}


@pytest.fixture(scope="module")
def tomorrow(tmp_path_factory):
    """Data of the same tables, other samples."""
    folder = tmp_path_factory.mktemp("data") / "tomorrow"
    generate_few(
        SyntheticConfig(scale=1e-4, days=2, rows_per_day=384, rows_per_block=384, rows_per_file=384, seed=5),
        folder,
    )
    return folder


@pytest.fixture
def inputs(world_of_one, small_dataset, tmp_path):
    made = []

    def work(*overrides, resume=None, **options):
        settings = [f"data.uri={small_dataset}", "data.global_batch_size=32"]
        config = load_config("tiny", [*settings, f"train.run_folder={tmp_path / 'runs'}", *overrides])
        made.append(prepare(config, "tiny", ALONE, resume, **options))
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


def test_one_rank_alone_measures_only_how_fast_it_is(inputs, caplog):
    trainer = build(inputs("train.measure_scaling=true"), StopSignal())
    trainer.replicas.close()
    figures = trainer.scaling.figures()
    assert (figures.workers, figures.noise, figures.link) == (1, None, None)
    assert "only the speed is measured" in caplog.text
    assert build(inputs(), StopSignal()).scaling is None


def test_dynamic_batching_on_a_gpu_is_refused(inputs):
    of_gpu = replace(inputs("train.batching=dynamic"), device=torch.device("cuda"))
    with pytest.raises(ValueError, match="does not see how long a GPU"):
        build(of_gpu, StopSignal())


def test_dynamic_batching_of_one_rank_alone_changes_nothing(inputs):
    trainer = build(inputs("train.batching=dynamic"), StopSignal())
    assert trainer.batching is None


def test_a_run_folder_that_cannot_be_made_is_a_mistake_on_all_ranks(inputs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="run"):
        build(inputs(f"train.run_folder={tmp_path / 'file'}"), StopSignal())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_dense_part_moves_to_a_gpu_and_tables_wait_to_be_sharded(features):
    model = build_model(ModelConfig(kind="dcnv2"), features, DENSE_NAMES, torch.float32)
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
        ("train.pipeline=delayed", DelayedSync, LocalGradients),
    ],
)
def test_the_dense_synchronization_is_the_configured_one(override, kind, own, inputs):
    """And what that needs is saved: with the trainer what ranks have in common, the rest for each rank."""
    trainer = build(inputs(override, "checkpoint.every_steps=5"), StopSignal())
    trainer.telemetry.close()
    trainer.replicas.close()
    assert type(trainer.replicas) is kind
    registered = trainer.session._checkpointer.state
    assert isinstance(registered._own.get(kind.own_name), own or type(None))
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


def test_initial_values_are_drawn_once_and_not_where_tables_are_loaded(inputs, tmp_path, monkeypatch):
    drawn = []

    def counted(draw, values, *arguments, **options):
        drawn.append(len(values.reshape(-1)))
        return draw(values, *arguments, **options)

    def drawn_rows(trainer):
        """Number of values of tables that were drawn until training can begin, and of tables."""
        trainer.session.restore()
        sizes = [shard.weights.numel() for shard in find_shards(trainer.model)]
        return sum(size for size in drawn if size in sizes), sum(sizes)

    monkeypatch.setattr(tables, "draw_uniform", partial(counted, tables.draw_uniform))
    uniform = torch.Tensor.uniform_  # TorchRec's
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda *args, **options: counted(uniform, *args, **options))
    options = ("checkpoint.every_steps=8", "train.max_steps=3")
    for overrides in ((), options):
        drawn.clear()
        with built(inputs(*overrides)) as trainer:
            num_drawn, num_values = drawn_rows(trainer)
            assert num_drawn == num_values
            if overrides:
                trainer.train()
                trained = values_of(trainer)
    (folder,) = (each for each in (tmp_path / "runs").iterdir() if (each / "checkpoint").exists())
    warm = inputs(*options, f"train.warm_start={folder}/checkpoint")
    for loading in (warm, inputs(*options, resume=folder)):
        drawn.clear()
        with built(loading) as trainer:
            assert drawn_rows(trainer)[0] == 0
            assert_equal(values_of(trainer), trained)


@pytest.mark.parametrize("way", ["resume", "warm_start"])
def test_learning_rates_are_the_configured_ones_and_not_those_of_the_save(inputs, tmp_path, way):
    options = ("checkpoint.every_steps=2", "train.max_steps=4")
    with built(inputs(*options)) as trainer:
        trainer.train()
    (folder,) = (tmp_path / "runs").iterdir()
    options = ("checkpoint.every_steps=2", "train.max_steps=8", "tables.learning_rate=1e-12")
    if way == "warm_start":
        options, folder = (*options, f"train.warm_start={folder}/checkpoint"), None
    with built(inputs(*options, resume=folder)) as trainer:
        trainer.session.restore()
        before = values_of(trainer)
        batch = next(iter(trainer.loader))
        trainer._train_on(batch)
        moved = {name: (value - before[name]).abs().max() for name, value in values_of(trainer).items()}
    weights = {name: float(by) for name, by in moved.items() if name.endswith("/weights")}
    assert weights
    assert max(weights.values()) < 1e-8
    assert float(moved["top.logit.weight"]) > 1e-4


def values_of(trainer):
    """Copies of tables with their optimizer state, dense parameters and the state of their optimizer."""
    tables = {
        f"{shard.name}/{name}": column.clone()
        for shard in find_shards(trainer.model, trainer.optimizers.table_optimizers)
        for name, column in shard.columns.items()
    }
    dense = {name: each.detach().clone() for name, each in trainer._dense.items()}
    state = trainer.optimizers.dense.state_dict()["state"]
    states = {
        f"{name} {at}": value.clone()
        for at, each in state.items()
        for name, value in each.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    return {**tables, **dense, **states}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


LATE = ("train.pipeline=delayed", "dense.optimizer=sgd", "dense.momentum=0.5", "checkpoint.every_steps=3")


@pytest.mark.parametrize("kind", ["none", "spike+weights"])
def test_a_run_with_late_gradients_resumes_bit_for_bit(inputs, tmp_path, kind):
    """Also after evaluations, and with more steps than it was started for."""
    options = (*LATE, f"train.compensation={kind}")
    with built(inputs(*options, "train.max_steps=4", "train.evaluate_every_steps=2")) as trainer:
        trainer.train()
    (folder,) = (tmp_path / "runs").iterdir()
    with built(inputs(*options, "train.max_steps=7", resume=folder)) as trainer:
        trainer.train()
        resumed = values_of(trainer)
    with built(inputs(*options, "train.max_steps=7")) as trainer:
        trainer.train()
        assert_equal(resumed, values_of(trainer))
        kept = {"momentum_buffer"} | ({"weights_before"} if kind == "spike+weights" else set())
        assert kept_by_dense_optimizer(trainer) == kept


def kept_by_dense_optimizer(trainer):
    return {name for state in trainer.optimizers.dense.state.values() for name in state}


def test_predicted_weights_are_seen_by_forward_and_backward_alone(inputs):
    with built(inputs(*LATE, "train.compensation=velocity", "train.max_steps=5")) as trainer:
        seen, real = [], []
        weight = next(iter(trainer._dense.values()))
        trainer.model.register_forward_pre_hook(lambda *_: seen.append(weight.detach().clone()))
        step = trainer.session.step

        def note_and_step(samples):
            real.append(weight.detach().clone())
            step(samples)

        trainer.session.step = note_and_step
        trainer.train()
    evaluated = seen[5:]
    assert evaluated
    assert all(torch.equal(each, real[-1]) for each in evaluated)
    assert torch.equal(seen[0], seen[1]), "the first step updates nothing"
    assert torch.equal(seen[1], real[0])
    for step in (2, 3, 4):  # the last update, -lr v, once more: nothing decays the learning rate
        moved = real[step - 1] - real[step - 2]
        assert moved.any()
        torch.testing.assert_close(seen[step], real[step - 1] + moved)


def test_a_resumed_run_forgets_what_another_compensation_kept(inputs, tmp_path):
    with built(inputs(*LATE, "train.compensation=weights", "train.max_steps=3")) as trainer:
        trainer.train()
    (folder,) = (tmp_path / "runs").iterdir()
    for kind in ("weights", "velocity", "none"):
        with built(inputs(*LATE, f"train.compensation={kind}", resume=folder)) as trainer:
            trainer.session.restore()
            assert ("weights_before" in kept_by_dense_optimizer(trainer)) == (kind == "weights")


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


@pytest.fixture
def larger(tmp_path):
    """Data of larger tables without the feature cat_3."""
    folder = tmp_path / "larger"
    sizes = {"rows_per_day": 384, "rows_per_block": 384, "rows_per_file": 384}
    generate_few(SyntheticConfig(scale=2e-4, days=2, **sizes), folder)
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["features"] = [each for each in manifest["features"] if each["name"] != "cat_3"]
    path.write_text(json.dumps(manifest))
    return folder


def test_another_vocabulary_is_warned_of_in_a_warm_start_and_refused_in_a_resume(
    inputs, small_dataset, tomorrow, tmp_path, caplog
):
    def encoded(source, name, digest):
        folder = shutil.copytree(source, tmp_path / name)
        manifest = json.loads((folder / "dataset.json").read_text())
        sparse = [{"column": feature["name"]} for feature in manifest["features"]]
        manifest["schema"] = {"label": {"column": "label"}, "sparse": sparse}
        manifest["provenance"]["files"] = [{"path": "vocabulary/cat_4.parquet", "sha256": digest}]
        (folder / "dataset.json").write_text(json.dumps(manifest))
        return folder

    first = encoded(small_dataset, "first", "a")
    same, other = encoded(tomorrow, "same", "a"), encoded(tomorrow, "other", "b")
    with built(inputs("checkpoint.every_steps=2", "train.max_steps=2", f"data.uri={first}")) as trainer:
        trainer.train()
    (old,) = (tmp_path / "runs").iterdir()
    for uri, warned in ((same, False), (other, True)):
        caplog.clear()
        options = (f"data.uri={uri}", f"train.warm_start={old}/checkpoint", "checkpoint.every_steps=2")
        with built(inputs(*options)) as trainer:
            trainer.session.restore()
        assert ("of cat_4: rows of tables stand for other values" in caplog.text) == warned
    path = same / MANIFEST_NAME
    path.write_text(
        path.read_text().replace('"int_0"', '"x"').replace('"int_1"', '"int_0"').replace('"x"', '"int_1"')
    )
    with built(inputs(f"data.uri={same}", *options[1:])) as trainer:
        new = values_of(trainer)
        with pytest.raises(
            ValueError, match=f"from {old}/checkpoint: its dense .* int_1, int_0, .* of int_0, int_1, "
        ):
            trainer.session.restore()
        assert_equal(values_of(trainer), new)
    path = first / MANIFEST_NAME
    path.write_text(path.read_text().replace('"sha256": "a"', '"sha256": "b"'))
    refused = pytest.raises(ValueError, match=f"{first} was made again since {old} .* of cat_4: ids mean")
    with refused, built(inputs(f"data.uri={first}", resume=old)):
        pass


@pytest.mark.parametrize(("kind", "optimizer"), [("dlrm", "adagrad"), ("dcnv2", "adam"), ("deepfm", "lamb")])
def test_a_warm_start_with_other_tables_takes_the_words_of_its_refusal(
    inputs, larger, tmp_path, kind, optimizer, caplog
):
    options = ("checkpoint.every_steps=8", "train.max_steps=3", f"dense.optimizer={optimizer}")
    options = (*options, f"model.kind={kind}", "model.cross_rank=8")
    with built(inputs(*options)) as trainer:
        trainer.train()
        before = values_of(trainer)
    (old,) = (tmp_path / "runs").iterdir()
    options = (*options, f"data.uri={larger}")
    with built(inputs(*options)) as trainer:
        trainer.session.restore()
        new = values_of(trainer)
    options = (*options, f"train.warm_start={old}/checkpoint")
    with built(inputs(*options)) as trainer, pytest.raises(MismatchError) as refusal:
        trainer.session.restore()
    words = re.search(r"allow it to differ: (.*) \(dlrm.train: --allow", str(refusal.value))[1].split()
    assert "remove:cat_3" in words
    assert any(word.startswith("grow:cat_") for word in words)
    assert any(word.startswith("reset:") for word in words)
    last = len(trainer._dense) - 1
    equal = [*trainer._dense][last]
    assert before[equal].shape == new[equal].shape
    with built(inputs(*options, changes=Changes.of(*words, f"reset:{equal}"))) as trainer:
        trainer.session.restore()
        assert "cat_2, cat_4" in caplog.text.partition("the features changed from ")[2]
        assert "dense weights of equal shape were kept" in caplog.text
        assert "as reset:" not in caplog.text, "each word is used"
        for name, value in values_of(trainer).items():
            if name == equal or name.endswith(f" {last}"):
                assert torch.equal(value, new[name]), name
            elif name in before and before[name].shape == value.shape:
                assert torch.equal(value, before[name]), name
            elif name in before and value.dim() == 2 and "cat_" in name:
                num_old = len(before[name])
                assert torch.equal(value[:num_old], before[name]), name
                assert torch.equal(value[num_old:], new[name][num_old:]), name
            elif name in new:
                assert torch.equal(value, new[name]), name
        trainer.train()
        assert trainer.steps_done == 3


def test_a_warm_start_needs_a_save_of_the_other_run(inputs, tmp_path):
    options = (f"train.warm_start={tmp_path}/nothing", "checkpoint.every_steps=8", "sharding.strategy=des")
    trainer = build(inputs(*options), StopSignal())
    with pytest.raises(NothingSavedError, match="a warm start needs a run that has saved"):
        _train(trainer)
    assert not [*(tmp_path / "runs").iterdir()]


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
