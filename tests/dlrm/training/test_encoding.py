"""Data whose columns are others, or in another order, than those that a run was trained on."""

import json
from dataclasses import asdict

import pytest

from data.dataset import DatasetManifest, Feature
from dlrm.config.schema import Config, TrainConfig
from dlrm.telemetry.folder import DATA_NAME
from dlrm.training.encoding import refuse_other_encoding, refuse_other_order, warn_of_other_inputs


def manifest(dense, features):
    features = tuple(Feature(name=name, rows=5) for name in features)
    return DatasetManifest(features=features, parts=(), dense=tuple(dense))


@pytest.fixture
def config(tmp_path):
    """Of a warm start from a run whose data had these columns."""
    (tmp_path / DATA_NAME).write_text(json.dumps(asdict(manifest("pq", "abc"))))
    return Config(train=TrainConfig(warm_start=f"{tmp_path}/checkpoint"))


@pytest.mark.parametrize(
    ("dense", "features", "difference"),
    [
        ("qp", "abc", "its dense columns come in another order: q, p instead of p, q"),
        ("pq", "bac", "its features come in another order: b, a, c instead of a, b, c"),
        ("pq", "cdb", "its features come in another order: c, b instead of b, c"),
    ],
)
def test_another_order_is_refused(config, tmp_path, dense, features, difference):
    given = manifest(dense, features)
    with pytest.raises(ValueError, match=f"warm start from {tmp_path}/checkpoint: {difference}, .* schema"):
        refuse_other_order(config, given)
    with pytest.raises(ValueError, match=f"data was made again since {tmp_path} .*, and {difference}. Put"):
        refuse_other_encoding(tmp_path, given, "data")


def test_other_columns_are_warned_of_in_a_warm_start(config, tmp_path, caplog):
    for dense, features in (("pq", "abc"), ("pqr", "abc")):  # a layer notices the third
        warn_of_other_inputs(config, manifest(dense, features), keeps_dense=True)
        refuse_other_encoding(tmp_path, manifest(dense, features), "data")
    assert not caplog.records
    other = manifest("zq", "bcd")
    refuse_other_order(config, other)
    with pytest.raises(ValueError, match=r"made again .*, and its dense columns are z, q instead of p, q\."):
        refuse_other_encoding(tmp_path, other, "data")
    warn_of_other_inputs(config, other, keeps_dense=False)
    warn_of_other_inputs(config, other, keeps_dense=True)
    dense, again, features = (record.getMessage() for record in caplog.records)
    assert dense == again
    assert "its dense columns are z, q instead of p, q. Its weights read them" in dense
    assert "from a, b, c to b, c, d, and dense weights of equal shape were kept" in features
