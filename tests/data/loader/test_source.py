"""Reading Parquet and refusing what is wrong in it, with a message that says where."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import fs

from data.dataset import MANIFEST_NAME
from data.loader import DataLoader, LoaderConfig, ParquetSource
from data.loader.decode import decode
from data.loader.source import OPEN_FILES

FILE = "day=0/part-0.parquet"


@pytest.fixture
def dataset(tmp_path, make_dataset):
    return tmp_path, make_dataset(tmp_path, row_groups=((20, 20),))


def rewrite(folder: Path, manifest, change) -> None:
    """Put a changed table into the file and give the manifest the size it then has."""
    path = folder / FILE
    pq.write_table(change(pq.read_table(path)), path, row_group_size=20, write_page_checksum=True)
    part = replace(manifest.parts[0], num_bytes=path.stat().st_size, sha256=sha256(path))
    (folder / MANIFEST_NAME).write_text(replace(manifest, parts=(part,)).to_json())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def with_column(name, array):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, array)


def read_all(folder):
    return list(DataLoader(str(folder), LoaderConfig(batch_size=4)))


def columns(rows):
    return [column.values.tolist() for column in (rows.label, *rows.dense, *rows.ids)]


def floats(*first):
    return pa.array([*first, *([0.0] * (40 - len(first)))], pa.float32())


def ids(*first):
    return pa.array([*first, *([0] * (40 - len(first)))], pa.int32())


def test_raw_ids_are_any_64_bit_integers(dataset):
    folder, manifest = dataset
    raw = tuple(replace(feature, rows=0) for feature in manifest.features)
    extremes = [0, -1, -(2**63), 2**63 - 1]

    def change(table):
        for feature in raw:
            kind = table.schema.field(feature.name).type
            wide = pa.list_(pa.int64()) if pa.types.is_list(kind) else pa.int64()
            table = with_column(feature.name, table.column(feature.name).cast(wide))(table)
        return with_column("cat_0", pa.array(extremes * 10, pa.int64()))(table)

    rewrite(folder, replace(manifest, features=raw), change)
    seen = [each for batch in read_all(folder) for each in batch.sparse["cat_0"].values().tolist()]
    assert sorted(seen) == sorted(extremes * 10)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("cat_1", ids(1, 2, 17), "column cat_1 holds id 17, but its table has 17 rows: ids go from 0 to 16"),
        ("cat_1", ids(1, -3), "column cat_1 holds id -3"),
        ("cat_0", ids(1, None), "column cat_0 has missing values"),
        (
            "cat_0",
            ids().cast(pa.uint64()),
            "column cat_0 should be int32 or int64, or lists of it, but is uint64",
        ),
        (
            "cat_0",
            pa.array([[0.5]] * 40),
            "column cat_0 should be int32 or int64, or lists of it, but is list",
        ),
        ("cat_2", pa.array([[1, None]] * 40, pa.list_(pa.int32())), "column cat_2 has missing values"),
        ("cat_2", pa.array([[1, 27]] * 40, pa.list_(pa.int32())), "column cat_2 holds id 27"),
        ("int_1", floats(1.0, float("nan")), "column int_1 holds nan, .*row 1 of a row group"),
        ("int_1", floats(float("inf")), "column int_1 holds inf, .*row 0 of a row group"),
        ("int_1", floats(None), "column int_1 has missing values"),
        ("int_1", pa.array([1e300] * 40), "column int_1 holds 1e.300, which is not finite in float32"),
        ("int_1", pa.array(["1"] * 40), "column int_1 should be float32 or another number, but is string"),
        ("label", pa.array([2] * 40, pa.int8()), "column label holds 2; a label is 0 or 1 .row 0 of"),
        ("label", floats(0.5), "column label holds 0.5"),
        (
            "label",
            pa.array(["1"] * 40),
            "column label should be .* a float or a bool, but is string",
        ),
    ],
)
def test_wrong_values_and_types_are_refused_by_name(dataset, name, array, message):
    folder, manifest = dataset
    rewrite(folder, manifest, with_column(name, array))
    with pytest.raises(ValueError, match=f"{FILE}: {message}.*prepare"):
        read_all(folder)


def test_a_missing_column_is_named(dataset):
    folder, manifest = dataset
    rewrite(folder, manifest, lambda table: table.drop_columns(["cat_1", "int_0"]))
    with pytest.raises(ValueError, match=rf"{FILE} lacks the columns \['cat_1', 'int_0'\]"):
        read_all(folder)


def test_order_of_columns_and_further_columns_in_the_file_do_not_matter(dataset):
    folder, manifest = dataset
    before = [batch.sparse.values() for batch in read_all(folder)]
    rewrite(folder, manifest, lambda t: t.select(t.column_names[::-1]).append_column("extra", ids()))
    for one, other in zip(before, read_all(folder), strict=True):
        assert one.equal(other.sparse.values())


@pytest.mark.parametrize("keep", [0, 10, 500, -1])
def test_a_truncated_file_is_refused_by_name(dataset, keep):
    folder, _ = dataset
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(OSError, match=rf"cannot read .*{FILE}: \d+ bytes instead of.*--verify"):
        read_all(folder)


def test_a_missing_file_is_refused_by_name(dataset):
    folder, _ = dataset
    (folder / FILE).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"{FILE} is in the data set's manifest but not in its folder"
    ):
        read_all(folder)


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@example(where=0.999, bit=0)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_flipped_bit_is_noticed_or_harmless(dataset, where, bit):
    folder, manifest = dataset
    path, part = folder / FILE, manifest.parts[0]
    whole = path.read_bytes()
    source = ParquetSource(str(folder), manifest)
    good = [columns(decode(source.read(part, group), manifest, FILE)) for group in range(2)]
    damaged = bytearray(whole)
    damaged[int(where * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    refusal = None
    try:
        source = ParquetSource(str(folder), manifest)
        for group in range(2):
            assert columns(decode(source.read(part, group), manifest, FILE)) == good[group]
    except (OSError, ValueError) as error:
        refusal = str(error)
    finally:
        path.write_bytes(whole)
    assert refusal is None or FILE in refusal


def test_any_pyarrow_filesystem_works(dataset):
    folder, manifest = dataset
    local = ParquetSource(str(folder), manifest)
    mounted = ParquetSource(
        folder.name, manifest, filesystem=fs.SubTreeFileSystem(str(folder.parent), fs.LocalFileSystem())
    )
    part = manifest.parts[0]
    assert mounted.read(part, 1).equals(local.read(part, 1))
    assert local.read(part, 1).column_names == list(manifest.columns)
    uri = DataLoader(folder.as_uri(), LoaderConfig(batch_size=4))
    assert len(list(uri)) == 10


def test_few_files_are_kept_open(tmp_path, make_dataset):
    manifest = make_dataset(tmp_path, row_groups=((4,),) * (OPEN_FILES + 3))
    source = ParquetSource(str(tmp_path), manifest)
    for part in manifest.parts:
        source.read(part, 0)
    assert list(source._files) == [f"{tmp_path}/{part.path}" for part in manifest.parts[-OPEN_FILES:]]
    source.close()
    assert source.read(manifest.parts[0], 0).num_rows == 4


def test_files_are_checked_without_opening_any(dataset):
    folder, manifest = dataset
    source = ParquetSource(str(folder), manifest)
    source.check_files(manifest.parts)
    path = folder / FILE
    path.write_bytes(b"x" * manifest.parts[0].num_bytes)
    source.check_files(manifest.parts)
    path.write_bytes(b"x")
    with pytest.raises(OSError, match=f"{FILE} has 1 bytes instead of {manifest.parts[0].num_bytes}"):
        source.check_files(manifest.parts)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=f"{FILE} is in the data set's manifest but not in"):
        source.check_files(manifest.parts)


def test_files_without_a_size_pass_the_check(dataset):
    folder, manifest = dataset
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    ParquetSource(str(folder), manifest).check_files(manifest.parts)
