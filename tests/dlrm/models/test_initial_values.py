"""Initial values of each model's tables: their range, on any plan, and the first logits that follow."""

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM_DCN
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.criteo import DENSE_NAMES, KAGGLE_CARDINALITIES
from data.dataset import Feature
from dlrm.config.schema import Config, ModelConfig, TablesConfig, TrainConfig
from dlrm.models.build import build_model
from dlrm.sharding.dynamic import table as dynamic_table
from dlrm.training.build import shard
from tests.dlrm.inputs import fake_inputs

WEIGHT_STD, FACTOR_STD = 1e-4, 0.01
KINDS = ("dlrm", "dcnv2", "deepfm", "fm", "lr")


def config_of(kind):
    return ModelConfig(
        kind=kind, embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(16, 1), cross_layers=2, cross_rank=8
    )


@pytest.mark.parametrize("kind", KINDS)
def test_values_have_the_variance_of_the_models_source_on_any_plan(kind, features, shard_model, whole_tables):
    kinds = {"cat_0": "data_parallel", "cat_1": "table_wise", "cat_2": "column_wise", "cat_3": "row_wise"}
    prefixes = {"lr": ("linear_",), "fm": ("", "linear_"), "deepfm": ("", "linear_")}.get(kind, ("",))
    plan = {
        f"{prefix}{name}": "table_wise" if prefix and how == "column_wise" else how
        for prefix in prefixes
        for name, how in kinds.items()
    }
    cut = whole_tables(shard_model(plan, config_of(kind)))
    whole = whole_tables(shard_model(dict.fromkeys(plan, "table_wise"), config_of(kind)))
    assert sorted(cut) == sorted(whole) == sorted(plan)
    for name, values in whole.items():
        assert torch.equal(values, cut[name]), name
        std = (3 * len(values)) ** -0.5
        if kind in {"fm", "deepfm", "lr"}:
            std = WEIGHT_STD if name.startswith("linear_") else FACTOR_STD
        assert values.abs().max() <= std * 3**0.5
        if values.numel() >= 300:
            assert values.std().item() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize(("kind", "bound"), [("dlrm", 64**-0.5), ("fm", FACTOR_STD * 3**0.5)])
def test_a_row_of_a_dynamic_table_starts_in_the_models_range(
    kind, bound, features, shard_model, make_batch, monkeypatch
):
    given = []
    draw = dynamic_table.initial_values
    monkeypatch.setattr(
        dynamic_table, "initial_values", lambda *arguments: given.append(draw(*arguments)) or given[-1]
    )
    tables = TablesConfig(dynamic=("cat_2",), dynamic_rows=64)
    model = shard_model(model=config_of(kind), tables=tables)
    batch = make_batch(200, seed=1)
    model(batch.dense, batch.sparse)
    values = torch.cat([each for each in given if each.shape[1] == 8])
    assert 0.9 * bound < values.abs().max() <= bound


@pytest.mark.parametrize("kind", ["deepfm", "fm", "lr"])
def test_first_logits_are_small_with_the_table_sizes_and_integers_of_criteo(kind, world_of_one):
    """Tables of 3 to 30 rows and integers whose logarithms reach 10 once made logits of 12 in `deepfm`."""
    rows = [min(rows, 5000) for rows in KAGGLE_CARDINALITIES]
    features = [Feature(name=f"cat_{place}", rows=rows) for place, rows in enumerate(rows)]
    model = shard(fake_inputs(Config(model=config_of(kind), train=TrainConfig(precision="fp32")), features))
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.randint(0, rows, (64,), generator=generator) for rows in rows])
    sparse = KeyedJaggedTensor(
        keys=[feature.name for feature in features],
        values=ids,
        lengths=torch.ones(len(ids), dtype=torch.int64),
    )
    with torch.no_grad():
        logits = model(10 * torch.rand(64, 13, generator=generator), sparse)
    assert logits.abs().max() < 3


def test_dcnv2_starts_like_torchrecs(features):
    """Of which MLPerf's reference is made; its tables start in the default range."""
    torch.manual_seed(1)
    rows = [
        EmbeddingBagConfig(name=f.name, embedding_dim=8, num_embeddings=f.rows, feature_names=[f.name])
        for f in features
    ]
    theirs = DLRM_DCN(EmbeddingBagCollection(tables=rows), 13, [64, 8], [256, 1], 2, 24)
    config = ModelConfig(
        kind="dcnv2", embedding_dim=8, bottom_mlp=(64, 8), top_mlp=(256, 1), cross_layers=2, cross_rank=24
    )
    ours = build_model(config, features, DENSE_NAMES, torch.float32)
    found = [each for each in ours.parameters() if not each.is_meta]
    wanted = [each for name, each in theirs.named_parameters() if "embedding_bags" not in name]

    def spreads(parameters):
        return sorted((each.numel(), round(float(each.detach().std(correction=0)), 9)) for each in parameters)

    assert len(found) == len(wanted)
    for (size, spread), (other_size, other) in zip(spreads(found), spreads(wanted), strict=True):
        assert size == other_size
        assert spread == pytest.approx(other, rel=0.5 if size < 100 else 0.15)
