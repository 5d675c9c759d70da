"""The command: what it prints, its exit codes, and schemas that it guesses."""

import re

import polars as pl
import pytest

from data.convert import __main__ as command
from data.convert.guess import guess
from data.dataset import read_manifest
from data.encoding import differing_inputs
from data.jobs.location import Location
from data.schema import Encoder, Schema
from tests.data.convert.conftest import inline_workers, write_csv, write_jsonl, write_parquet

ROWS = [
    {
        "user.id": 10 + index % 30,
        "rating": [1, 3.5, 4, 5][index % 4],
        "price": index * 0.25,
        "views": index,
        "genres": ["Action", "Sci-Fi"][: index % 3],
        'a "b"\\': "xyz"[index % 3],
        "timestamp": 1_700_000_000 + 5000 * index,
    }
    for index in range(60)
]


@pytest.mark.parametrize("write", [write_csv, write_jsonl, write_parquet])
def test_a_guessed_schema_converts_the_file_that_it_was_guessed_from(tmp_path, monkeypatch, capsys, write):
    monkeypatch.setattr("data.convert.job.local_workers", inline_workers)
    suffix = write.__name__.removeprefix("write_")
    path = write(tmp_path / f"t.{suffix}", ROWS)
    schema_path, out = tmp_path / "schema.toml", tmp_path / "out"
    assert command.main(["--guess", str(path), "-o", str(schema_path)]) == 0
    schema = Schema.from_toml(schema_path)
    assert schema.label.column == "rating"
    assert schema.label.at_least == 4
    assert {dense.column: dense.log1p for dense in schema.dense} == {"price": False, "views": True}
    assert [sparse.name for sparse in schema.sparse] == ["user_id", "genres", 'a "b"_']
    assert [sparse.is_list for sparse in schema.sparse] == [False, True, False]
    assert schema.time is not None
    assert (schema.time.column, schema.time.unit) == ("timestamp", "s")
    assert command.main([str(schema_path), str(path), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert f"{out}: 60 rows on 5 days in 5 files; 0 bad rows" in told
    assert "genres: 4 table rows" in told
    assert command.main(["--verify", str(out)]) == 0
    (out / "vocabulary" / "genres.parquet").write_bytes(b"")
    assert command.main(["--verify", str(out)]) == 1
    told = capsys.readouterr().out
    assert "vocabulary/genres.parquet has 0 bytes" in told
    assert "1 problem. Delete the named files" in told
    assert command.main([str(schema_path), str(path), "--out", str(out)]) == 0
    assert "is damaged (vocabulary/genres.parquet has 0 bytes" in capsys.readouterr().err
    assert command.main(["--verify", str(out)]) == 0
    assert command.main(["--guess", str(path), "-o", str(schema_path)]) == 2
    assert "exists; remove it" in capsys.readouterr().err


def test_a_guess_of_flags_dates_and_flat_numbers(tmp_path):
    rows = [
        {"id": f"r{index}", "clicked": index % 2 > 0, "when": f"2024-01-{1 + index:02}"}
        for index in range(25)
    ]
    text = guess(Location.of(write_csv(tmp_path / "t.csv", rows)))
    assert "at_least" not in text
    assert "[[sparse]]  # hardly a value occurs twice" in text
    with pytest.raises(ValueError, match=r"none\.csv is not a file"):
        guess(Location.of(tmp_path / "none.csv"))


def test_a_guess_without_a_label_says_so_and_takes_neither_time_nor_codes_for_numbers(tmp_path):
    rows = [
        {"Event Time": 1_700_000_000 + index, "bought?": ("yes", "no")[index % 2], "zip": f"{index:05}"}
        for index in range(40)
    ]
    (tmp_path / "schema.toml").write_text(guess(Location.of(write_csv(tmp_path / "t.csv", rows))))
    assert "# No column looks like the label" in (tmp_path / "schema.toml").read_text()
    schema = Schema.from_toml(tmp_path / "schema.toml")
    assert schema.time is not None
    assert (schema.time.column, schema.label.column) == ("Event Time", "bought?")
    assert ([one.column for one in schema.sparse], schema.dense) == (["zip"], ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a schema file"),
        (["{}/s.toml"], "name the output folder"),
        (["{}/s.toml", "--out", "{}/out"], r"s\.toml cannot be read"),
        (["--guess", "{}/t.csv", "--memory", "1G"], "take nothing else"),
        (["--verify", "{}", "x"], "take nothing else"),
        (["{}/s.toml", "{}/t.csv", "--out", "{}/out", "--memory", "much"], "cannot be read|not a size"),
    ],
)
def test_mistakes_of_the_command_line_have_code_2(tmp_path, capsys, arguments, message):
    assert command.main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("data.convert: ")
    assert re.search(message, error)


def test_new_rows_are_converted_like_an_existing_data_set(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("data.convert.job.local_workers", inline_workers)
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'label.column = "click"\n[[dense]]\ncolumn = "price"\nstandardize = true\n'
        '[[sparse]]\ncolumn = "user"\nmin_count = 1\n'
        '[[sparse]]\ncolumn = "tags"\nlist = true\nmin_count = 1\n'
    )
    old = [{"click": i % 2, "price": i / 3, "user": f"u{i % 9}", "tags": ["a", "b"]} for i in range(40)]
    new = [
        {"click": 1, "price": 7.0 * i, "user": f"u{30 - i}", "tags": ["b", f"c{i}"][: i % 3]}
        for i in range(30)
    ]
    tables = {
        "old": write_parquet(tmp_path / "o.parquet", old),
        "new": write_jsonl(tmp_path / "n.jsonl", new),
    }
    like, out, again = (str(tmp_path / name) for name in ("like", "out", "again"))
    assert command.main([str(schema), str(tables["old"]), "--out", like]) == 0
    for _ in range(2):
        assert command.main(["--like", like, str(tables["new"]), "--out", out]) == 0
    assert command.main(["--verify", out]) == 0
    ours, theirs = read_manifest(out), read_manifest(like)
    assert (ours.schema, ours.features) == (theirs.schema, theirs.features)
    encoder = Encoder.of_dataset(like)
    made = pl.concat([pl.read_parquet(tmp_path / "out" / part.path) for part in ours.parts])
    assert made.select(encoder.columns).equals(encoder.encode(pl.DataFrame(new)))
    assert differing_inputs(ours, theirs) == []
    assert command.main([str(schema), str(tables["new"]), "--out", again]) == 0
    assert differing_inputs(read_manifest(again), theirs) == ["price", "user", "tags"]
    changed = schema.read_text().replace("min_count = 1", "min_count = 2", 1)
    schema.write_text(changed)
    capsys.readouterr()
    assert command.main([str(schema), str(tables["new"]), "--out", again]) == 2
    assert "schema.sparse[0].min_count: there 1, now 2)" in capsys.readouterr().err
    (tmp_path / "like" / "vocabulary" / "user.parquet").write_bytes(b"")
    assert command.main(["--like", like, str(tables["new"]), "--out", str(tmp_path / "x")]) == 2
    assert "user.parquet is damaged" in capsys.readouterr().err


def test_rows_without_labels_are_converted_to_be_scored(tmp_path, monkeypatch, capsys):
    """They have neither label nor fold, and a time that cannot be read: nothing of it is bad or reordered."""
    monkeypatch.setattr("data.convert.job.local_workers", inline_workers)
    schema = tmp_path / "schema.toml"
    schema.write_text(
        'label = {column = "rating", name = "click", at_least = 4}\ntime = {column = "when", unit = "s"}\n'
        'split = {column = "fold", days = {train = 0, test = 1}}\n'
        '[[dense]]\ncolumn = "price"\nstandardize = true\n[[sparse]]\ncolumn = "user"\nmin_count = 1\n'
    )
    old = [
        {"rating": i % 6, "when": -i, "fold": ("train", "test")[i % 2], "price": i, "user": f"u{i % 9}"}
        for i in range(40)
    ]
    new = [{"price": 7.0 * i, "user": f"u{30 - i}", "when": "soon"} for i in range(30)]
    tables = [str(write_csv(tmp_path / name, rows)) for name, rows in (("o.csv", old), ("n.csv", new))]
    like, out, own = (str(tmp_path / name) for name in ("like", "out", "own"))
    assert command.main([str(schema), tables[0], "--out", like]) == 0
    capsys.readouterr()
    assert command.main(["--like", like, tables[1], "--out", out]) == 2
    assert re.search("has no column 'rating'; .* take --no-labels", capsys.readouterr().err)
    for _ in range(2):
        assert command.main(["--like", like, "--no-labels", tables[1], "--out", out]) == 0
        assert (
            "30 rows on 1 day in 1 file; 0 bad rows\n  user: 11 table rows\nno labels: "
            in capsys.readouterr().out
        )
    assert command.main(["--like", out, tables[0], "--out", str(tmp_path / "none")]) == 0  # which has labels
    assert f"no labels, as {out} has none: for `python -m dlrm.predict`" in capsys.readouterr().out
    assert command.main(["--verify", out]) == 0
    ours, theirs = read_manifest(out), read_manifest(like)
    assert (ours.label, ours.dense, ours.features) == (theirs.label, theirs.dense, theirs.features)
    assert differing_inputs(theirs, ours) == []
    made = pl.read_parquet(tmp_path / "out" / ours.parts[0].path, hive_partitioning=False)
    assert made.equals(Encoder.of_dataset(like).encode(pl.DataFrame(new)))
    # files that do have the column
    assert command.main([str(schema), "--no-labels", tables[0], "--out", own]) == 0
    assert pl.read_parquet(tmp_path / "own" / "day=0" / "*.parquet", hive_partitioning=False).columns == [
        "price",
        "user",
    ]
    capsys.readouterr()
    assert command.main([str(schema), tables[0], "--out", own]) == 2
    assert 'schema.label.column: there "", now "rating"' in capsys.readouterr().err
