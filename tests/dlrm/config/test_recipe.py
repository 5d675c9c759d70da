"""Recipes and `--set`: values, and messages for mistakes."""

import json
from pathlib import Path

import pytest

from dlrm.config.recipe import load_config, load_resumed, load_warm_started, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_can_be_dumped(name):
    config = load_config(name)
    assert config.to_dict()["model"]["kind"] == config.model.kind
    assert config.train.device == "auto"


SGD = ("sgd", 0.1)
ADAGRAD = ("adagrad", 0.004)


@pytest.mark.parametrize(
    ("name", "kind", "dim", "bottom", "top", "batch", "cap", "optimizer"),
    [
        ("kaggle", "dlrm", 16, (512, 256, 64, 16), (512, 256, 1), 128, 0, SGD),
        ("terabyte", "dlrm", 64, (512, 256, 64), (512, 512, 256, 1), 2048, 10**7, SGD),
        ("mlperf-dcnv2", "dcnv2", 128, (512, 256, 128), (1024, 1024, 512, 256, 1), 65536, 4 * 10**7, ADAGRAD),
    ],
)
def test_published_values(name, kind, dim, bottom, top, batch, cap, optimizer):
    """The recipes of facebookresearch/dlrm and MLPerf; the papers compare with these."""
    config = load_config(name)
    model = config.model
    assert (model.kind, model.embedding_dim, model.bottom_mlp, model.top_mlp) == (kind, dim, bottom, top)
    assert (model.cross_layers, model.cross_rank) == (3, 512)
    assert (config.data.global_batch_size, config.tables.max_rows, config.train.epochs) == (batch, cap, 1)
    assert (config.tables.optimizer, config.tables.learning_rate) == optimizer
    assert (config.dense.optimizer, config.dense.learning_rate) == optimizer


def test_overrides_are_toml_or_else_text():
    config = load_config(
        "tiny",
        [
            "train.epochs=3",
            "data.shuffle=false",
            "model.top_mlp=[64, 1]",
            "tables.learning_rate=1",
            "data.uri=s3://bucket/x=y",
            'train.run_folder="2026"',
            "data.test_days = [3]",
            "sharding.kinds=['table_wise']",
        ],
    )
    assert config.train.epochs == 3
    assert config.data.shuffle is False
    assert config.model.top_mlp == (64, 1)
    assert config.tables.learning_rate == 1.0
    assert isinstance(config.tables.learning_rate, float)
    assert config.data.uri == "s3://bucket/x=y"
    assert config.train.run_folder == "2026"
    assert config.data.test_days == (3,)
    assert config.sharding.kinds == ("table_wise",)


OWN = """
[model]
kind = "a.b:C"
[model.options]
dim = 16
names = ["x"]
[model.options.tower]
mlp = [8, 4]
"""


def test_options_of_an_own_model_are_sections_of_any_keys(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    overrides = ["model.options.dim=32", "model.options.tower.relu=true", "model.options.new={a=1}"]
    config = load_config(str(path), overrides)
    wanted = {"dim": 32, "names": ["x"], "tower": {"mlp": [8, 4], "relu": True}, "new": {"a": 1}}
    assert config.model.options == wanted
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "own.toml", **config.to_dict()}))
    for load in (load_resumed, load_warm_started):
        assert load(tmp_path, ["model.options.new.a=2"])[1].model.options == {**wanted, "new": {"a": 2}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.options.day=2020-01-01", r"model\.options\.day is datetime\.date.*; give a number"),
        ("model.options.dim.x=1", r"model\.options\.dim must be a section of key = value lines, not 16"),
        ("model.options=3", r"model\.options must be a section"),
        ("model.top_mlp=[8,1]", r"model\.top_mlp: only built-in models read this, .* a\.b:C; leave it out"),
        ("model.kind=dlrm", r"model\.kind is dlrm: leave out model\.options\.dim, model\.options\.names"),
        ("model.kind=a.b:", r"choose one of dlrm, .* or name a class of yours as package\.module:Class"),
    ],
)
def test_wrong_options_of_an_own_model_are_refused(tmp_path, override, message):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    with pytest.raises(ValueError, match=message):
        load_config(str(path), [override])


def test_a_warm_start_is_configured_as_the_other_run_but_saves_elsewhere(tmp_path):
    config = load_config("tiny", ["data.global_batch_size=64", "checkpoint.uri=s3://bucket/a"])
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "tiny", **config.to_dict()}))
    recipe, warm = load_warm_started(tmp_path, ["data.uri=tomorrow"])
    assert (recipe, warm.train.warm_start, warm.checkpoint.uri) == ("tiny", "s3://bucket/a", "")
    assert (warm.data.uri, warm.data.global_batch_size) == ("tomorrow", 64)
    with pytest.raises(ValueError, match="only reads the other run's checkpoint"):
        load_warm_started(tmp_path, ["checkpoint.uri=s3://bucket/a"])
    config = load_config("tiny")
    (tmp_path / "config.json").write_text(json.dumps({"recipe": "tiny", **config.to_dict()}))
    assert load_warm_started(tmp_path)[1].train.warm_start == str(tmp_path / "checkpoint")
    assert load_warm_started(tmp_path / "best")[1].train.warm_start == str(tmp_path / "best")
    with pytest.raises(ValueError, match=r"not the folder of a run.*Name one that dlrm.train has made"):
        load_warm_started(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("uri", "best"),
    [
        ("", "runs/a/best"),
        ("/data/checkpoints", "/data/checkpoints/best"),
        ("s3://bucket/a/", "s3://bucket/a/best"),
        ("s3://bucket/a?region=eu-1", "s3://bucket/a/best?region=eu-1"),
    ],
)
def test_the_best_state_lies_in_the_run_folder_or_below_the_checkpoint(uri, best):
    config = load_config("tiny", [f"checkpoint.uri={uri}"])
    assert config.checkpoint.best_directory(Path("runs/a")) == best


def test_a_recipe_may_be_a_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nepochs = 4\n")
    assert load_config(str(path), ["train.seed=5"]).train.epochs == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=2", r"unknown configuration key train\.epoch; did you mean train\.epochs\?"),
        ("tabels.eps=1", r"unknown configuration key tabels; did you mean tables\?"),
        ("train.zzz=2", r"train\.zzz; known: .*epochs"),
        ("model.top_mlp.x=1", r"unknown configuration key model\.top_mlp\.x; did you mean model\.top_mlp"),
        ("train.epochs", "section.key=value, not 'train.epochs'"),
        ("epochs=2", "section.key=value"),
        (".epochs=2", "section.key=value"),
        ("train.=2", "section.key=value"),
        ("", "section.key=value"),
        ("train.epochs=two", r"train\.epochs must be a whole number, not 'two'"),
        ("train.epochs=1.5", r"train\.epochs must be a whole number"),
        ("train.epochs=true", r"train\.epochs must be a whole number"),
        ("train.epochs=", r"train\.epochs must be a whole number, not ''"),
        ("data.shuffle=1", r"data\.shuffle must be true or false"),
        ("data.shuffle=yes", r"data\.shuffle must be true or false"),
        ("data.uri=2026", r"data\.uri must be a \"text\""),
        ("tables.learning_rate=true", r"tables\.learning_rate must be a number"),
        ("model.top_mlp=1", r"model\.top_mlp must be a list"),
        ("model.top_mlp=[64, 'x', 1]", r"model\.top_mlp\[1\] must be a whole number"),
    ],
)
def test_wrong_overrides_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        load_config("tiny", [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"train = 3", "train must be a section"),
        (b"[train\n", "not valid TOML"),
        (b"\xff\xfe\x00", r"mine\.toml is not valid TOML"),
        (b"[train]\nepochs = 0", "train.epochs must be at least 1"),
        (b"[trainer]\nepochs = 1", "did you mean train"),
    ],
)
def test_wrong_recipe_files_are_refused(tmp_path, content, message):
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_config(str(path), ["train.seed=1"])


@pytest.mark.parametrize("recipe", ["nosuch", "nosuch.toml", ""])
def test_unknown_recipes_name_the_known_ones(recipe):
    with pytest.raises(ValueError, match=r"there is no recipe .*kaggle, lr, mlperf-dcnv2, terabyte, tiny"):
        load_config(recipe)
