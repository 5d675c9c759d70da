"""Raw rows are scored by an exported program as `dlrm.predict` scores the data set that was made of them."""

import runpy
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from data.dataset import read_manifest
from dlrm.inference.program.exporting import ExportJob, export
from dlrm.inference.scoring import ScoreJob, score
from dlrm.scorer import Scorer
from tests.readmes import as_run, blocks, command, run

SCHEMA = """
label = { column = "rating", at_least = 4 }
dense = [{ column = "price", log1p = true, standardize = true }]
sparse = [
    { column = "shop.name", name = "cat_0" },
    { column = "tags", separator = "|", min_count = 2 },
    { column = "item", type = "integer", ids = "modulo", rows = 50 },
]
time = { column = "when", unit = "day" }
"""

pytestmark = pytest.mark.system  # for the time that tracing takes


@pytest.fixture
def raw():
    """600 rows of two days."""
    generator = np.random.default_rng(0)
    tags = [["a", "b", "c,d", "rare"][:number] for number in generator.integers(0, 5, 600)]
    return pl.DataFrame(
        {
            "rating": generator.integers(1, 6, 600),
            "price": generator.lognormal(size=600),
            "shop.name": generator.choice(["x", "Zürich", "items"], 600),
            "tags": ["|".join(each) for each in tags],
            "item": generator.integers(0, 10**6, 600),
            "when": np.repeat([0, 1], 300),
        }
    )


def scores_of(path):
    return pl.read_parquet(path)["score"].to_numpy()


def test_raw_rows_are_scored_as_the_data_set_made_of_them(train, raw, tmp_path, capsys, monkeypatch):
    """By the commands of the READMEs, from a table to its scores."""
    monkeypatch.chdir(tmp_path)
    raw.write_csv("ratings.csv")
    raw[:200].write_parquet("log-0.parquet")
    raw[200:].write_parquet("log-1.parquet")
    raw[200:400].write_csv("new.csv")
    raw.drop("rating", "when").write_csv("today.csv")
    run(command("data/convert/README.md", "--guess"))
    Path("schema.toml").write_text(SCHEMA)  # corrected by hand
    run(command("data/convert/README.md", "ratings.csv --out"))
    run(command("data/convert/README.md", "--processes"))
    run(command("data/convert/README.md", "new.csv"))
    run(command("data/convert/README.md", "--no-labels"))
    run(command("data/convert/README.md", "--verify"))
    assert "all digests and row counts are right" in capsys.readouterr().out
    digests = [[part.sha256 for part in read_manifest(each).parts] for each in ("ratings", "bucket/log")]
    assert digests[0] == digests[1]

    folder, _ = train("train.precision=fp32", data=tmp_path / "ratings")
    as_run(folder)
    score(ScoreJob(run=folder, out=tmp_path / "expected.parquet"))
    expected = scores_of("expected.parquet")
    Path("datasets").mkdir()
    Path("datasets", "small").symlink_to(tmp_path / "new")
    run(command("dlrm/README.md", "dlrm.predict"))
    run(command("dlrm/README.md", "--out model.pt2"))
    assert pl.read_parquet("scores.parquet").columns == ["score", "logit", "day", "rating", "cat_0"]
    assert np.allclose(scores_of("scores.parquet"), expected[300:400], rtol=0, atol=1e-6)

    rows = raw.drop("rating", "when")
    rows.write_csv("rows.csv")
    rows.write_ndjson("rows.jsonl")
    rows.write_parquet("rows.parquet")
    script = command("dlrm/README.md", "examples.score")
    for suffix in ("csv", "jsonl", "parquet"):
        run([word.replace("rows.csv", f"rows.{suffix}") for word in script])
        assert np.allclose(scores_of("scored.parquet"), expected, rtol=0, atol=1e-6)
    assert "600 rows in" in capsys.readouterr().out

    monkeypatch.setattr("dlrm.scorer.BLOCK_BYTES", 2000)  # a file in many blocks
    scorer = Scorer(tmp_path / "model.pt2")
    for suffix in ("csv", "jsonl", "parquet"):
        parts = [*scorer.score_file(tmp_path / f"rows.{suffix}")]
        assert len(parts) > 3
        assert np.allclose(np.concatenate(parts), expected, rtol=0, atol=1e-6)
    scorer.metadata["least_samples"] = 2  # as of a program that does not take one sample alone
    assert np.allclose(scorer.score(raw[7:8]), expected[7:8], rtol=0, atol=1e-6)
    assert scorer.score(raw[:0]).shape == (0,)

    (snippet,) = [block for block in blocks("python") if block.label == "snippet: a service"]
    exec(snippet.text, {"rows": raw[:2].to_dicts()})
    assert f"{expected[0]:.4}"[:5] in capsys.readouterr().out

    lines = (tmp_path / "rows.csv").read_text().splitlines(keepends=True)
    (tmp_path / "short.csv").write_text("".join(lines[:500]) + "1,2\n" + "".join(lines[500:]))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["score", "model.pt2", "short.csv", "--out", "short.parquet"])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_module("examples.score", run_name="__main__")
    complaint = "short.csv, row 500: another number of fields than the header"
    assert capsys.readouterr() == ("", f"examples.score: {complaint}\n")
    assert not Path("short.parquet").exists()
    rows.drop("tags").write_parquet(tmp_path / "less.parquet")
    with pytest.raises(ValueError, match="no column 'tags'"):
        next(scorer.score_file(tmp_path / "less.parquet"))
    with pytest.raises(ValueError, match=r"cannot be loaded as a \.pt2 file"):
        Scorer(tmp_path / "rows.csv")


def test_prepared_rows_with_weights_are_scored(train, small_log, tmp_path):
    dynamic = ("tables.dynamic=['page']", "tables.dynamic_rows=40")
    folder, _ = train("train.precision=fp32", *dynamic, data=small_log)
    export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
    score(ScoreJob(run=folder, out=tmp_path / "expected.parquet", days=[1]))
    files = (tmp_path / "model.pt2", small_log / "day=1.parquet", "--out", tmp_path / "scores.parquet")
    run(["python", "-m", "examples.score", *map(str, files)])
    found, expected = (scores_of(tmp_path / f"{name}.parquet") for name in ("scores", "expected"))
    assert np.allclose(found, expected, rtol=0, atol=1e-6)
