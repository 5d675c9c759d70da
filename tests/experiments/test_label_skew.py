"""Labels skewed between ranks: files of the streams, figures of made-up runs, and a real run."""

import pytest

from data.dataset import read_manifest
from data.stream.folder import FolderStream
from data.stream.source import START, Place
from data.synthetic import SyntheticConfig, generate
from experiments import label_skew
from experiments.streaming.runs import WORKERS


@pytest.mark.parametrize("is_skewed", [True, False])
def test_ranks_read_equally_many_records_and_skewed_ones_of_one_label(tmp_path, is_skewed):
    dataset = tmp_path / "data"
    generate(SyntheticConfig(days=3, rows_per_day=5000), dataset)
    label_skew.write_stream(dataset, tmp_path / "in", is_skewed=is_skewed)
    manifest = read_manifest(str(dataset))
    stream = FolderStream(str(tmp_path / "in"), manifest, str(dataset), is_encoded=True)
    labels = []
    for rank in range(WORKERS):
        places, found = dict.fromkeys(stream.partitions[rank::WORKERS], START), []
        while (fetched := stream.fetch(places, 1000)) is not None:
            places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
            found += fetched.checked.rows.label.values.tolist()
        labels.append(found)
    clicks, others = map(len, labels)
    assert clicks == sum(map(sum, labels))
    assert clicks + others == 10_000
    assert (set(labels[0]), set(labels[1])) == (({1.0}, {0.0}) if is_skewed else ({0.0, 1.0}, {0.0, 1.0}))


def test_figures_of_made_up_runs():
    rows = [
        {"exchange": exchange, "labels": labels, "seed": seed, "auc": 0.7 + 0.01 * seed + added}
        for seed in range(2)
        for exchange, labels, added in (
            ("dense", "skewed", 0.001 * seed),
            ("dense", "mixed", 0.0),
            ("topk", "mixed", 0.0),
            ("topk", "skewed", -0.003),
            ("dense", "dealt", 0.002),
            ("topk", "dealt", -0.001),
            ("dense", "all_dealt", 0.0),
            ("topk", "all_dealt", 0.004),
        )
    ]
    figures = label_skew.figures_of(rows)
    assert figures["skew_auc_delta_dense"] == pytest.approx(0.0005)
    assert figures["skew_auc_delta_topk"] == pytest.approx(-0.003)
    assert figures["skew_auc_delta_topk_ci"] == pytest.approx(0)
    assert figures["dealt_auc_delta_topk"] == pytest.approx(-0.001)
    assert figures["all_dealt_auc_delta_topk"] == pytest.approx(0.004)
    assert figures["skew_auc_delta_dense_ci"] == pytest.approx(0.0005 * 12.706, rel=1e-3)


@pytest.mark.system
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forks")
def test_quick_run(run_quick, tmp_path):
    stored = run_quick(label_skew.main, "label_skew")
    assert len(stored["rows"]) == 16
    auc = {row["key"]: row["auc"] for row in stored["rows"]}
    others = [
        row["auc"]
        for row in stored["rows"]
        if row["exchange"] == "topk" or row["labels"] in ("skewed", "mixed")
    ]
    assert len(set(others)) == 12, "seed, exchange and labels have an effect"
    for seed in range(2):  # dealt records are trained in the same step, and sums do not see by whom
        for labels in ("dealt", "all_dealt"):
            assert auc[f"dense {labels} {seed}"] == pytest.approx(auc[f"dense skewed {seed}"], abs=0.02)
    assert (tmp_path / "runs/quick/label_skew.png").stat().st_size > 5000
