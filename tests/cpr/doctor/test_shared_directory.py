"""All nodes must see the same checkpoint directory."""

from functools import partial

import pytest

from cpr.checkpoint.storage.local import LocalStorage
from cpr.doctor import shared_directory
from cpr.doctor.shared_directory import check_shared_directory
from cpr.errors import RendezvousError
from tests.cpr.doctor.nodes import run_nodes


def check(*uris, **options):
    return run_nodes(*(partial(check_shared_directory, uri=uri and str(uri)) for uri in uris), **options)


@pytest.fixture
def roots(tmp_path):
    """Two directories; nothing may be left in them."""
    found = [tmp_path / name for name in ("first", "second")]
    for root in found:
        root.mkdir()
    yield found
    assert not [*found[0].iterdir(), *found[1].iterdir()]


def test_one_directory_is_seen_by_all(roots):
    assert [each.state for each in check(roots[0], roots[0], roots[0])] == 3 * ["ok"]


def test_another_directory_is_told_on_all_nodes(roots):
    first, second, third = check(roots[0], roots[1], roots[0])
    assert [each.state for each in (first, second, third)] == 3 * ["PROBLEM"]
    assert f"{roots[0]} is not what node 1 (b) writes to. What to do: mount one shared" in first.text
    assert f"{roots[1]} is not what node 0 (a), node 2 (c) writes to" in second.text
    assert "or the nodes were given different directories" in second.text
    assert "not what node 1 (b) writes" in third.text


class Elsewhere(LocalStorage):
    """An object store in which each client sees its own files only."""

    def __init__(self, uri):
        super().__init__(uri.removeprefix("s3:/"))
        self.uri = uri


def test_object_stores_are_checked_too(roots, monkeypatch):
    monkeypatch.setattr(shared_directory, "open_storage", Elsewhere)
    first, second = check(f"s3:/{roots[0]}", f"s3:/{roots[1]}")
    assert "What to do: name the same bucket and prefix on all nodes" in first.text
    assert "not what node 0 (a) writes to" in second.text
    assert [each.state for each in check(f"s3:/{roots[0]}", f"s3:/{roots[0]}")] == ["ok", "ok"]


class Caching(LocalStorage):
    """Lists a folder once, as NFS may do for half a minute."""

    def __init__(self, uri):
        super().__init__(uri)
        self.listed = {}

    def list(self, folder=""):
        return iter(self.listed.setdefault(folder, list(super().list(folder))))


def test_a_listing_that_lags_is_told(roots, monkeypatch):
    monkeypatch.setattr(shared_directory, "open_storage", Caching)
    for found in check(roots[0], roots[0]):
        assert found.state == "PROBLEM"
        assert "is listed late, so that two runs could take it at once. What to do: mount" in found.text


def test_a_node_that_cannot_write_is_told_on_all_nodes(roots, tmp_path):
    (tmp_path / "file").touch()
    for found in check(roots[0], tmp_path / "file"):
        assert found.state == "PROBLEM"
        assert "writing " in found.text
        assert found.text.count("What to do") == 1


def test_all_nodes_need_the_option(roots):
    for found in check(roots[0], None):
        assert found.state == "PROBLEM"
        assert "no --checkpoint. What to do: give all nodes the same one" in found.text


def test_files_of_a_node_that_ends_meanwhile_are_deleted(roots):
    def end(meeting):
        folder, *_ = meeting.gather("name of a folder", None)
        (roots[0] / folder).mkdir(exist_ok=True)
        (roots[0] / folder / "1").touch()

    survivor, _ = run_nodes(partial(check_shared_directory, uri=str(roots[0])), end, timeout_s=0.5)
    assert isinstance(survivor, RendezvousError)
    assert "node 1 (b) has ended" in str(survivor)


def test_prefixes_of_a_bucket_are_told_apart(s3):
    first, second = check(s3.uri("bucket/a"), s3.uri("bucket/a"))
    assert (first.state, second.state) == ("ok", "ok")
    first, second = check(s3.uri("bucket/a"), s3.uri("bucket/b"))
    assert "s3://bucket/a is not what node 1 (b) writes to" in first.text
    assert "doctor" not in s3.request("GET", "/bucket")
