"""Files that are replaced whole, or not at all."""

import errno

import pytest

from dlrm.launch.files import replace_text


def test_a_full_disk_leaves_the_old_content_and_is_told_with_the_file(tmp_path, monkeypatch):
    path = tmp_path / "launches"
    replace_text(path, "old")

    def write_text(*_):
        raise OSError(errno.ENOSPC, "No space left on device")  # as a write says it, without a name

    monkeypatch.setattr(type(path), "write_text", write_text)
    with pytest.raises(OSError, match=r"No space left on device.*launches"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
