"""A data set that cannot be read: what is said of it."""

import json

import pytest

from data import dataset
from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, read_manifest


@pytest.mark.parametrize("name", ["absent", "file", "file/inside", "empty"])
def test_folder_without_a_data_set_raises_with_the_remedy(tmp_path, name):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"{name} holds no dataset\.json.*data\.prepare"):
        read_manifest(str(tmp_path / name))


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b"3"])
def test_invalid_manifest_is_refused(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r"dataset\.json cannot be read .* prepare the data again"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize(
    ("uri", "cause"),
    [
        ("floppy://a/b", "Unrecognized filesystem type"),
        ("s3://", "s3:// cannot be opened"),
        ("gs://", "gs:// cannot be opened"),
        ("gs://bucket/a?speed=5", "Unexpected query parameter"),
    ],
)
def test_unsupported_uri_raises_with_an_example(uri, cause):
    with pytest.raises(ValueError, match=rf"{cause}.* give a folder or a URI such as s3://BUCKET/FOLDER"):
        read_manifest(uri)


def test_unreachable_store_is_named_without_secrets(monkeypatch):
    monkeypatch.setattr(dataset, "GCS_RETRY_S", 1)
    with pytest.raises(
        OSError, match=r"gs://bucket/a cannot be read \(.*check that it can be reached"
    ) as error:
        read_manifest("gs://anonymous@bucket/a?scheme=http&endpoint_override=127.0.0.1:1")
    assert "error_info" not in str(error.value)
    with pytest.raises(ValueError, match=r"s3://bucket/a cannot be opened") as error:
        read_manifest("s3://key:secret@bucket/a?speed=5")
    assert "secret" not in str(error.value)


def test_a_manifest_without_the_newer_fields_has_the_bytes_of_an_older_one():
    manifest = DatasetManifest(features=(Feature(name="cat_0", rows=3),), parts=(), dense=("int_0",))
    text = manifest.to_json()
    assert set(json.loads(text)) == {"features", "parts", "dense", "provenance", "format_version"}
    assert json.loads(text)["features"] == [{"name": "cat_0", "rows": 3}]
    assert DatasetManifest.from_json(text) == manifest


def test_all_fields_of_a_manifest_are_read_back():
    manifest = DatasetManifest(
        features=(
            Feature(name="tags", rows=9, weights="scores"),
            Feature(name="more", rows=0, weights="scores"),
        ),
        parts=(),
        dense=(),
        label="clicked",
        schema={"label": {"name": "clicked"}},
    )
    assert DatasetManifest.from_json(manifest.to_json()) == manifest
    assert manifest.columns == ("clicked", "tags", "more", "scores")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": (), "dense": ()}, "neither dense columns nor features"),
        ({"dense": ("a", "a")}, "column 'a' of the data set has two roles"),
        ({"label": "f"}, "column 'f' of the data set has two roles"),
        ({"dense": ("",)}, "empty name"),
        ({"features": (Feature(name="f", rows=1, weights="f"),)}, "column 'f' of the data set has two roles"),
    ],
)
def test_a_manifest_whose_columns_have_no_role_or_two_is_refused(changes, message):
    fields = {"features": (Feature(name="f", rows=1),), "parts": (), "dense": ("a",), **changes}
    with pytest.raises(ValueError, match=message):
        DatasetManifest(**fields)
