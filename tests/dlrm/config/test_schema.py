"""The configuration refuses values and combinations that cannot work."""

from contextlib import nullcontext
from dataclasses import fields

import pytest

from dlrm.config.recipe import load_config
from dlrm.config.schema import Config, ShardingConfig


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.global_batch_size=0"], "data.global_batch_size must be at least 1, not 0"),
        (["data.window_batches=0"], "data.window_batches"),
        (["data.order=random"], "data.order is 'random'; choose one of stripes, seldp"),
        (["data.prefetch_batches=0"], "data.prefetch_batches"),
        (["data.cache_disk_gb=-1"], "data.cache_disk_gb"),
        (["data.cache_memory_gb=8"], "limits of a cache; set data.cache_folder"),
        (["data.train_days=[0,1]", "data.test_days=[1,2]"], r"days \[1\] are both"),
        (["model.kind=dlmr"], "model.kind is 'dlmr'; choose one of dlrm, dcnv2, deepfm"),
        (["model.embedding_dim=6"], "positive multiple of 4"),
        (["model.embedding_dim=0"], "positive multiple of 4"),
        (["model.embedding_dim=32"], r"the last width of model\.bottom_mlp must equal .*32"),
        (["model.bottom_mlp=[]"], r"model\.bottom_mlp"),
        (["model.top_mlp=[64,2]"], r"the last width of model\.top_mlp must be 1"),
        (["model.top_mlp=[]"], r"the last width of model\.top_mlp must be 1"),
        (["model.top_mlp=[0,1]"], "widths must be positive"),
        (["model.kind=dcnv2", "model.cross_layers=0"], r"model\.cross_layers"),
        (["model.kind=dcnv2", "model.cross_rank=0"], r"model\.cross_rank"),
        (["tables.optimizer=adam"], "tables.optimizer is 'adam'; choose one of sgd"),
        (["tables.learning_rate=0"], "tables.learning_rate must be positive, not 0.0"),
        (["tables.eps=0"], "tables.eps must be positive"),
        (["tables.max_rows=-1"], "tables.max_rows"),
        (["tables.dynamic_rows=0"], r"tables.dynamic_rows is 0; choose 1 to 2\*\*31 - 1"),
        (["tables.admit_after=0"], "tables.admit_after must be at least 1"),
        (["tables.dynamic_rows=100"], r"are about dynamic tables, .* name their features in tables\.dynamic"),
        (["tables.admit_after=2"], r"are about dynamic tables, .* name their features in tables\.dynamic"),
        (["dense.optimizer=rowwise_adagrad"], "dense.optimizer is 'rowwise_adagrad'; choose"),
        (["dense.weight_decay=0.1"], "dense.weight_decay is for lars and lamb; dense.optimizer is"),
        (["dense.optimizer=lamb", "dense.weight_decay=-1"], "dense.weight_decay must be at least 0"),
        (["dense.optimizer=lamb", "dense.trust_coefficient=0.01"], "is for lars; dense.optimizer is lamb"),
        (["dense.optimizer=lars", "dense.trust_coefficient=0"], "dense.trust_coefficient must be positive"),
        (["dense.momentum=0.9"], "dense.momentum is for sgd; dense.optimizer is adagrad"),
        (["dense.optimizer=sgd", "dense.momentum=1"], "dense.momentum is 1; choose a share"),
        (["dense.clip_norm=-1"], "dense.clip_norm must be at least 0"),
        (["schedule.warmup_steps=-1"], "schedule.warmup_steps must be at least 0"),
        (["schedule.decay_start_step=5"], "needs schedule.decay_steps"),
        (
            ["schedule.warmup_steps=10", "schedule.decay_start_step=5", "schedule.decay_steps=5"],
            "must not lie before the end of the warm-up",
        ),
        (["schedule.power=0"], "schedule.power"),
        (["sharding.kinds=[]"], "sharding.kinds is empty"),
        (["sharding.kinds=['tablewise']"], "'tablewise'; known kinds are column_wise, grid_shard, row_wise"),
        (["sharding.data_parallel_rows=-1"], "sharding.data_parallel_rows"),
        (["sharding.min_column_dim=6"], "min_column_dim is 6; FBGEMM wants a positive multiple of 4"),
        (["sharding.exchange_dtype=fp8"], "exchange_dtype is 'fp8'; choose one of fp32, bf16, fp16, int8"),
        (["sharding.data_parallel_gradients=sparse"], "'sparse'; choose one of dense, rows"),
        (
            ["sharding.data_parallel_gradients=rows", "sharding.data_parallel_rows=0"],
            r"about replicated tables; set sharding\.data_parallel_rows",
        ),
        (["comm.exchange=gossip"], "comm.exchange is 'gossip'; choose one of dense"),
        (
            ["comm.exchange=priority", "dense.clip_norm=1"],
            "comm.exchange=priority has no whole mean gradient",
        ),
        (["comm.exchange=selsync", "dense.optimizer=lamb"], "comm.exchange=selsync has no whole mean"),
        (["train.pipeline=delayed", "train.delay_steps=2"], "train.delay_steps is 2; choose 1"),
        (["train.delay_steps=0"], "train.pipeline is ids: leave them out, or set train.pipeline=delayed"),
        (
            ["train.compensation=spike"],
            "train.pipeline is ids: leave them out, or set train.pipeline=delayed",
        ),
        (
            ["train.pipeline=delayed", "train.delay_steps=0", "train.compensation=spike"],
            "nothing to compensate for.* set train.delay_steps=1",
        ),
        (
            ["train.pipeline=delayed", "train.compensation=weights"],
            "dense.optimizer is adagrad, dense.momentum 0: set dense.optimizer=sgd and dense.momentum=0.9",
        ),
        (
            ["train.pipeline=delayed", "train.compensation=spike", "dense.optimizer=sgd"],
            "dense.optimizer is sgd, dense.momentum 0: set",
        ),
        (
            ["train.pipeline=delayed", "comm.exchange=priority"],
            "priority overlaps with the next forward pass itself.* set comm.exchange=dense",
        ),
        (["train.pipeline=delayed", "comm.exchange=selsync"], "selsync averages parameters"),
        (["train.batching=dynamic", "comm.exchange=selsync"], "selsync averages parameters, where"),
        (["train.batching=dynamic", "comm.exchange=priority"], "priority waits .* choose another one"),
        (["train.measure_scaling=true", "comm.exchange=auto"], "compares norms .* set comm.exchange to one"),
        (["train.measure_scaling=true", "comm.exchange=priority"], "set comm.exchange to one of dense, ring"),
        (["train.measure_scaling=true", "comm.exchange=ring", "comm.wire_dtype=bf16"], "wire_dtype=fp32"),
        (["train.measure_scaling=true", "train.pipeline=delayed"], "moves apart: choose none"),
        (
            ["train.measure_scaling=true", "train.pipeline=waves", "train.wave_updates=tick_tock"],
            "or waves with train.wave_updates=sum",
        ),
        (["train.batching=dynamic", "train.pipeline=waves"], "choose none, ids, prefetch or auto"),
        (["train.batching=dynamic", "train.pipeline=delayed"], "choose none, ids, prefetch or auto"),
        (["train.pipeline=delayed", "comm.exchange=auto"], "auto runs in the thread that trains"),
        (["train.device=tpu"], "train.device is 'tpu'; choose one of auto, cpu, cuda"),
        (["train.precision=fp16"], "train.precision is 'fp16'; choose one of bf16, fp32"),
        (["train.epochs=0"], "train.epochs"),
        (
            ["train.keep_best=auc", "train.evaluate_every_steps=0"],
            "compares evaluations: set train.evaluate_every_epochs=1",
        ),
        (
            ["train.keep_best=acc"],
            "train.keep_best: 'acc' is no metric to compare; choose auc, .* or max:NAME",
        ),
        (["train.keep_best=min:loss"], "min:loss, a metric of an own model, and model.kind is dlrm; choose"),
        (["train.patience=2"], "train.patience needs a metric: set train.keep_best"),
        (["train.min_improvement=0.1"], "train.min_improvement says what train.patience waits for"),
        (["train.max_steps=-1"], "train.max_steps"),
        (["train.seed=-1"], "train.seed"),
        (["train.evaluate_every_steps=-1"], "train.evaluate_every_steps"),
        (["train.log_every_steps=0"], "train.log_every_steps"),
        (["recovery.max_lost_share=1.5"], "recovery.max_lost_share"),
        (["recovery.timeout_s=0"], "recovery.timeout_s"),
        (["recovery.timeout_s=1e20"], r"recovery.timeout_s is 1e\+20; choose more than 0 and at most 2.592e"),
        (["checkpoint.stop_within_s=-1"], "checkpoint.stop_within_s is -1; choose 0"),
        (["checkpoint.stop_within_s=1e20"], r"checkpoint.stop_within_s is 1e\+20; choose 0 \(never\) to"),
        (["recovery.max_pls=-1"], "recovery.max_pls"),
        (["checkpoint.priority=lru"], "checkpoint.priority is 'lru'; choose one of none, mfu"),
        (["checkpoint.priority=mfu"], "set checkpoint.every_steps"),
        (["checkpoint.ratio=0"], "checkpoint.ratio"),
        (["checkpoint.target_pls=1", "checkpoint.mean_hours_to_failure=5"], "checkpoint.target_pls is"),
        (["checkpoint.mean_hours_to_failure=-2"], "mean_hours_to_failure must be at least 0, not -2"),
        (["data.test_days=[0,0]"], r"data.test_days names days \[0\] more than once; name each day once"),
        (
            ["data.train_days=[0]", "data.test_days=[0]"],
            r"days \[0\] are both .* give each day to one of them",
        ),
        (["data.train_days=[1,2,1]"], r"data.train_days names days \[1\]"),
        (["checkpoint.target_pls=0.1"], "mean_hours_to_failure go together"),
        (["checkpoint.mean_hours_to_failure=5"], "go together"),
        (
            ["checkpoint.every_steps=5", "checkpoint.target_pls=0.1", "checkpoint.mean_hours_to_failure=5"],
            "both say how often",
        ),
    ],
)
def test_impossible_values_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config("tiny", overrides)


KEYS = [(section.name, key.name, key.type) for section in fields(Config) for key in fields(section.type)]


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, key, kind in KEYS if kind is float])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1" + 400 * "0"])
def test_numbers_must_be_finite(section, key, value):
    with pytest.raises(ValueError, match=rf"{section}\.{key} must be finite"):
        load_config("tiny", [f"{section}.{key}={value}"])


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, key, kind in KEYS if kind is int])
def test_numbers_beyond_64_bits_are_refused(section, key):
    with pytest.raises(ValueError, match=rf"{section}\.{key} must fit into 64 bits"):
        load_config("tiny", [f"{section}.{key}=99999999999999999999"])


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, key, _ in KEYS])
def test_values_of_a_wrong_type_are_refused_without_a_recipe_too(section, key):
    kind = next(each.type for each in fields(Config) if each.name == section)
    with pytest.raises(ValueError, match=rf"{section}\.{key} (must be|is <object)"):
        kind(**{key: object()})


def test_deepfm_needs_no_bottom_mlp():
    assert load_config("tiny", ["model.kind=deepfm", "model.bottom_mlp=[]"]).model.kind == "deepfm"


def test_a_wire_dtype_requires_partial_results():
    for options in ({"strategy": "des"}, {"strategy": "auto"}, {"kinds": ("table_wise", "row_wise")}):
        assert ShardingConfig(wire_dtype="bf16", **options).wire_dtype == "bf16"
    with pytest.raises(ValueError, match=r"set sharding\.strategy to des or auto"):
        ShardingConfig(wire_dtype="bf16", strategy="torchrec")


@pytest.mark.parametrize(
    ("options", "device", "message"),
    [
        ({"kinds": ("row_wise", "table_row_wise")}, "cuda", None),
        (
            {"kinds": ("row_wise", "table_row_wise")},
            "cpu",
            "no table_row_wise sharding on cpu; set",
        ),
        ({"kernels": ("fused", "fused_uvm_caching")}, "cuda", None),
        ({"kernels": ("fused_uvm",)}, "cpu", "no fused_uvm on cpu, where sharding.kernels is fused"),
        ({"wire_dtype": "bf16", "strategy": "auto"}, "cuda", None),
        ({"wire_dtype": "bf16", "kinds": ("row_wise",), "strategy": "torchrec"}, "cpu", None),
        (
            {"wire_dtype": "bf16", "kinds": ("row_wise",), "strategy": "torchrec"},
            "cuda",
            "on cuda, TorchRec itself sums row_wise tables",
        ),
        ({"exchange_dtype": "int8"}, "cuda", None),
        ({"exchange_dtype": "bf16", "kinds": ("row_wise", "table_row_wise")}, "cuda", None),
        (
            {"exchange_dtype": "int8", "kinds": ("table_wise", "grid_shard")},
            "cuda",
            "grid_shard tables are summed on their way",
        ),
        # row-wise tables have a sum of their own on the CPU
        ({"exchange_dtype": "int8", "kinds": ("table_wise", "row_wise")}, "cpu", None),
        (
            {"exchange_dtype": "int8", "kinds": ("table_wise", "row_wise")},
            "cuda",
            "row_wise tables are summed on their way, which int8 cannot be",
        ),
    ],
)
def test_what_a_device_lacks_is_refused(options, device, message):
    config = ShardingConfig(**options)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        config.check_device(device)
