"""Files that are replaced whole, or not at all."""

import errno
import os

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


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    path = tmp_path / "results"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        replace_text(path, "auc 0.8")
        assert os.read(reader, 100) == b"auc 0.8"
    finally:
        os.close(reader)
    assert path.is_fifo()
