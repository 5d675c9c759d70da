"""The comparison of the models with their counterparts."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import DatasetManifest, Feature, Part
from dlrm.config.schema import ModelConfig
from experiments.models import run
from experiments.models.references import ReferenceData, build_reference, check_features, tables_of

DIM = 4


def manifest(days):
    parts = [
        Part(path=f"{day}", day=day, num_rows=1, row_groups=(1,), num_bytes=1, sha256="")
        for day in range(days)
    ]
    return DatasetManifest(features=(Feature(name="a", rows=3),), parts=tuple(parts))


@pytest.mark.usefixtures("tmp_path")
def test_settings_are_chosen_on_a_day_that_is_not_reported(run_quick, tmp_path, monkeypatch):
    asked = []

    def train(task, kind, side, setting, seed):
        asked.append((task.train_days, task.evaluated_day, seed))
        is_best = setting == run.SETTINGS[1]
        auc = 0.7 + 0.05 * is_best + 0.001 * (side == "ours") + (0.2 if seed == 1 else 0)
        return {
            "model": kind,
            "side": side,
            "setting": str(setting),
            "seed": seed,
            "auc": auc,
            "log_loss": 1 - auc,
        }

    monkeypatch.setattr(run, "train", train)
    (tmp_path / "dataset.json").write_text(manifest(days=4).to_json())
    stored = run_quick(run.main, "models", "--data", str(tmp_path))
    assert {days for days, _, _ in asked} == {(0, 1)}
    assert {day for _, day, seed in asked if seed == run.CHOICE_SEED} == {2}
    assert {(day, seed) for _, day, seed in asked if seed != run.CHOICE_SEED} == {(3, 0), (3, 1)}
    chosen = {row["setting"] for row in stored["rows"] if row["seed"] != run.CHOICE_SEED}
    assert chosen == {str(run.SETTINGS[1])}
    for kind in run.RECIPES:
        assert stored["figures"][f"auc_minus_reference_{kind}"] == pytest.approx(0.001)
        assert stored["figures"][f"log_loss_minus_reference_{kind}"] == pytest.approx(-0.001)


def test_data_of_two_days_are_refused_in_one_line(run_quick, tmp_path, capsys):
    (tmp_path / "dataset.json").write_text(manifest(days=2).to_json())
    with pytest.raises(SystemExit) as stopped:
        run_quick(run.main, "models", "--data", str(tmp_path))
    assert stopped.value.code == 2
    assert "has 2 days" in capsys.readouterr().err


FEATURES = [Feature(name="one", rows=5), Feature(name="bag", rows=7)]


@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize("kind", ["deepfm", "fm", "lr"])
def test_a_reference_sums_bags_and_starts_at_its_librarys_values(kind, num_dense):
    data = ReferenceData(features=FEATURES, num_dense=num_dense, longest={"bag": 3})
    model = build_reference(ModelConfig(kind=kind, embedding_dim=DIM, top_mlp=(6, 1)), data, seed=1)
    assert max(table.detach().std() for table in tables_of(model)) < 2e-4
    generator = torch.Generator().manual_seed(1)
    for table in tables_of(model):
        table.data.normal_(generator=generator)
    sparse = KeyedJaggedTensor(
        keys=["one", "bag"], values=torch.tensor([0, 4, 6, 0, 6]), lengths=torch.tensor([1, 1, 3, 0])
    )
    dense = torch.rand(2, num_dense, generator=generator)
    inner = model.model
    one, bag = inner.linear_model.embedding_dict.values()
    wanted = torch.stack(
        [
            one.weight[0] + bag.weight[[6, 0, 6]].sum(0),
            one.weight[4],
        ]
    ).squeeze(1)
    if num_dense:
        wanted = wanted + (dense @ inner.linear_model.weight).squeeze(1)
    if kind == "deepfm":
        inner.dnn_linear.weight.data.zero_()  # leaves the factorization machine
    if kind != "lr":
        one, bag = inner.embedding_dict.values()
        products = [
            (one.weight[0] * bag.weight[[6, 0, 6]].sum(0)).sum(),
            torch.tensor(0.0),
        ]
        wanted = wanted + torch.stack(products)
    found = model(dense, sparse)
    assert found.shape == (2,)
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (Feature(name="bag", rows=7, weights="how_much"), "bag has weights"),
        (Feature(name="bag", rows=2**24 + 1), "ids of feature bag"),
        (Feature(name="bag", rows=0), "ids of feature bag"),
    ],
)
def test_data_that_the_references_do_not_take_are_refused(feature, message):
    with pytest.raises(ValueError, match=message):
        check_features([feature])


@pytest.mark.system
@pytest.mark.timeout(120)
def test_quick_run_trains_every_model_and_its_counterpart(run_quick, monkeypatch):
    monkeypatch.setattr(run, "SETTINGS", run.SETTINGS[:1])  # references choose from another one as well
    stored = run_quick(run.main, "models")
    sides = {(row["model"], row["side"]) for row in stored["rows"]}
    assert sides == {(kind, side) for kind in run.RECIPES for side in ("ours", "reference")}
    assert all(0.3 < row["log_loss"] < 2 for row in stored["rows"])
