"""Parquet of other programs becomes a data set: only a manifest is written, and the loader reads them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import MANIFEST_NAME, Feature, read_manifest
from data.index.__main__ import main
from data.loader import DataLoader, LoaderConfig

SCHEMA = """
[label]
column = "clicked"
[[dense]]
column = "price"
[[sparse]]
column = "item no."
[[sparse]]
column = "tags"
weights = "scores"
[[sparse]]
column = "shop"
rows = 40
"""
NUM_ROWS = 300


def frame() -> pl.DataFrame:
    """Rows as people have them: int64 ids, lists, doubles, booleans, and a column without a role."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 4, NUM_ROWS)
    return pl.DataFrame(
        {
            "clicked": rng.random(NUM_ROWS) < 0.3,
            "price": rng.random(NUM_ROWS),
            "item no.": rng.integers(0, 25, NUM_ROWS),
            "tags": [rng.integers(0, 9, size).tolist() for size in sizes],
            "scores": [(rng.integers(0, 9, size) / 4).tolist() for size in sizes],
            "shop": rng.integers(0, 30, NUM_ROWS),
            "comment": ["text"] * NUM_ROWS,
        },
        schema_overrides={"tags": pl.List(pl.Int64), "scores": pl.List(pl.Float64)},
    )


def by_polars(folder: Path, data: pl.DataFrame) -> None:
    data.write_parquet(folder / "part-9.parquet", row_group_size=70)
    data.with_columns(pl.col("shop").cast(pl.UInt32)).write_parquet(folder / "part-10.parquet")


def by_pyarrow(folder: Path, data: pl.DataFrame) -> None:
    table = data.to_arrow()
    place = table.schema.get_field_index("shop")
    table = table.set_column(place, "shop", table["shop"].dictionary_encode())
    for day in (3, 11):
        (folder / f"day={day}").mkdir()
        pq.write_table(table, folder / f"day={day}" / "data.parquet", row_group_size=33)


def by_duckdb(folder: Path, data: pl.DataFrame) -> None:
    """In a process of its own, as duckdb complains at the end of one."""
    source = folder.parent / "source.parquet"
    data.write_parquet(source)
    copies = "; ".join(
        f"COPY (SELECT *, '{month}' AS month FROM '{source}') TO '{folder}' "
        "(FORMAT parquet, PARTITION_BY (month), APPEND)"
        for month in ("2026-09", "2026-10")
    )
    command = [sys.executable, "-c", f"import duckdb; duckdb.execute({copies!r})"]
    subprocess.run(command, check=True, capture_output=True)


def by_spark(folder: Path, data: pl.DataFrame) -> None:
    """Files as Spark's legacy mode leaves them: groups `bag` of `array_element`, and marks of success."""
    table = data.to_arrow().cast(
        pa.schema(
            [
                pa.field(field.name, pa.list_(pa.field("array_element", field.type.value_type)))
                if pa.types.is_large_list(field.type)
                else field
                for field in data.to_arrow().schema
            ]
        )
    )
    for day in ("2026-01-31", "2026-02-01"):
        inside = folder / f"date={day}"
        inside.mkdir()
        pq.write_table(
            table.replace_schema_metadata(),
            inside / "part-00000-a.c000.snappy.parquet",
            use_compliant_nested_type=False,
            store_schema=False,
            version="1.0",
        )
        pq.write_table(table.slice(0, 0), inside / "part-00001-a.c000.snappy.parquet")
        (inside / ".part-00000-a.c000.snappy.parquet.crc").write_bytes(b"crc")
    (folder / "_SUCCESS").touch()
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "0.parquet").write_bytes(b"half")


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("write", "days"),
    [(by_polars, (0, 1)), (by_pyarrow, (3, 11)), (by_duckdb, (0, 1)), (by_spark, (0, 1))],
)
def test_files_of_other_writers_are_read_as_they_are(folder, schema, capsys, write, days):
    data = frame()
    write(folder, data)
    before = bytes_of(folder)
    assert main([str(folder), "--schema", str(schema)]) == 0
    said = capsys.readouterr().out
    after = bytes_of(folder)
    assert after.pop(str(folder / MANIFEST_NAME))
    assert after == before
    manifest = read_manifest(str(folder))
    assert manifest.days == days
    assert manifest.num_rows == 2 * NUM_ROWS
    assert manifest.features == (
        Feature(name="item no.", rows=25),
        Feature(name="tags", rows=9, weights="scores"),
        Feature(name="shop", rows=40),
    )
    clicks = data["clicked"].mean()
    assert f"{2 * NUM_ROWS:,} rows in 2 files on day {days[0]}, {days[1]}, {clicks:.1%} with label 1" in said
    assert f"tags: 9 rows, {data['tags'].list.len().mean():.3g} ids a sample, weights scores" in said
    config = LoaderConfig(batch_size=NUM_ROWS, shuffle=False)
    batches = list(DataLoader(str(folder), config))
    assert len(batches) == 2
    for batch in batches:
        assert batch.labels.tolist() == data["clicked"].cast(pl.Float32).to_list()
        assert batch.dense[:, 0].tolist() == data["price"].cast(pl.Float32).to_list()
        for name in ("item no.", "tags", "shop"):
            assert batch.sparse[name].values().tolist() == data[name].explode().drop_nulls().to_list()
        assert batch.sparse["tags"].weights().tolist() == data["scores"].explode().drop_nulls().to_list()
        assert batch.sparse["tags"].lengths().tolist() == data["tags"].list.len().to_list()
        assert set(batch.sparse["shop"].weights().tolist()) == {1.0}


def test_indexed_again_the_manifest_follows_the_files(folder, schema):
    by_polars(folder, frame())
    assert main([str(folder), "--schema", str(schema)]) == 0
    first = (folder / MANIFEST_NAME).read_bytes()
    assert main([str(folder), "--schema", str(schema)]) == 0
    assert (folder / MANIFEST_NAME).read_bytes() == first
    (folder / "part-10.parquet").unlink()
    frame().with_columns(pl.col("item no.") + 100).write_parquet(folder / "part-9.parquet")
    assert main([str(folder), "--schema", str(schema)]) == 0
    manifest = read_manifest(str(folder))
    assert (manifest.num_rows, manifest.features[0].rows) == (NUM_ROWS, 125)


def test_files_without_labels_are_indexed_to_be_scored(folder, schema, capsys):
    by_polars(folder, frame())
    assert main([str(folder), "--schema", str(schema), "--no-labels"]) == 2
    assert "has the label column 'clicked': leave out --no-labels" in capsys.readouterr().err
    assert main([str(folder), "--schema", str(schema)]) == 0
    labelled = read_manifest(str(folder))
    by_polars(folder, frame().drop("clicked"))
    capsys.readouterr()
    assert main([str(folder), "--schema", str(schema)]) == 2
    assert re.search("has no column 'clicked'; .*--no-labels", capsys.readouterr().err)
    assert main([str(folder), "--schema", str(schema), "--no-labels"]) == 0
    assert "on day 0, 1, no labels, for `python -m dlrm.predict`; 1 dense column\n" in capsys.readouterr().out
    manifest = read_manifest(str(folder))
    assert (manifest.label, manifest.features, manifest.num_rows) == (
        "clicked",
        labelled.features,
        2 * NUM_ROWS,
    )


def test_any_store_and_the_lack_of_a_test_day(folder, schema, capsys):
    frame().write_parquet(folder / "only.parquet")
    assert main([folder.as_uri(), "--schema", str(schema)]) == 0
    assert "There is one day" in capsys.readouterr().out
    assert read_manifest(str(folder)).days == (0,)


def test_a_guessed_schema_is_one_to_start_from(folder, tmp_path, capsys):
    by_polars(folder, frame().rename({"price": 'pri"ce'}))
    assert main([str(folder), "--guess"]) == 0
    guessed = capsys.readouterr().out
    assert '# column = "comment" (string)' in guessed.replace("large_string", "string")
    assert "may be weights" in guessed
    (tmp_path / "guess.toml").write_text(guessed)
    assert main([str(folder), "--schema", str(tmp_path / "guess.toml")]) == 0
    manifest = read_manifest(str(folder))
    assert (manifest.label, manifest.dense) == ("clicked", ('pri"ce',))
    assert [feature.name for feature in manifest.features] == ["item no.", "tags", "shop"]


NULL = pl.when(pl.col("shop") == 0).then(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pl.col("comment").alias("price"), "column price should be .* number, but is .*string.*data.convert"),
        (pl.col("price").alias("shop"), "column shop should be int32 or int64, .* but is double"),
        (pl.col("shop") + 11, r"column shop holds id \d+, but its table has 40 rows"),
        (pl.col("item no.") - 1, r"column item no. holds id -1, but ids go from 0.*ids = \"raw\""),
        (pl.col("item no.") * 2**33, "column item no. holds id .*too high for a row"),
        (NULL.otherwise(pl.col("price")).alias("price"), "column price has missing values"),
        (pl.col("shop").alias("clicked"), r"column clicked holds \d+; a label is 0 or 1"),
        (pl.col("scores").list.head(1), r"column scores has 1 weights, but tags has [23] ids"),
        (pl.col("price").alias("Clicked"), "has no column 'clicked'; did you mean 'Clicked'"),
    ],
)
def test_files_that_are_not_fit_are_refused_by_name(folder, schema, capsys, change, message):
    by_polars(folder, frame())
    wrong = frame().with_columns(change)
    wrong = wrong.drop("clicked") if "Clicked" in wrong.columns else wrong
    wrong.write_parquet(folder / "part-10.parquet")
    assert main([str(folder), "--schema", str(schema)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "part-10.parquet" in error
    assert re.search(message, error), error
    assert not (folder / MANIFEST_NAME).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[label]\ncolumn = 'a'\n", "neither dense columns nor features"),
        ("[label]\ncolumn = 'a'\n[[dense]]\ncolumn = 'a'\n", "column 'a' of the data set has two roles"),
        ("[label]\ncolumn = 'a'\n[[dense]]\ncolumn = 'b'\nlog1p = true\n", "has no key 'log1p'"),
        ("[label]\ncolumn = 'a'\n[[sparse]]\ncolumn = 'b'\nids = 'hash'\n", 'ids is "raw" or left out'),
        ("[label]\ncolumn = 'a'\n[[sparse]]\ncolumn = 'b'\nrows = 0\n", "rows is between 1"),
        ("[label", "schema.toml"),
    ],
)
def test_wrong_schemas_are_refused(folder, schema, capsys, text, message):
    schema.write_text(text)
    assert main([str(folder), "--schema", str(schema)]) == 2
    assert message in capsys.readouterr().err


def test_folders_that_cannot_be_indexed_are_refused(folder, schema, capsys):
    def refusal():
        assert main([str(folder), "--schema", str(schema)]) == 2
        return capsys.readouterr().err

    assert "there is no file that ends in .parquet" in refusal()
    (folder / "a.parquet").write_bytes(b"no Parquet")
    assert "a.parquet is not a Parquet file" in refusal()
    frame().write_parquet(folder / "a.parquet")
    (folder / "day=1").mkdir()
    frame().write_parquet(folder / "day=1" / "b.parquet")
    assert "folders of different keys" in refusal()
    (folder / MANIFEST_NAME).write_text(json.dumps({"format_version": 7}))
    assert "format 7" in refusal()
    made = {
        "format_version": 1,
        "features": [],
        "parts": [],
        "dense": ["x"],
        "provenance": {"maker": "data.prepare"},
    }
    (folder / MANIFEST_NAME).write_text(json.dumps(made))
    assert "a data set already, made by data.prepare" in refusal()
    assert main([str(folder / "nowhere"), "--schema", str(schema)]) == 2
    assert main([str(folder)]) == 2
    assert "give --schema FILE, or --guess" in capsys.readouterr().err
