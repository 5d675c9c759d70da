"""A rank's part of a save: files are durable when it is finished, or the save fails."""

from contextlib import contextmanager
from threading import Event

import pytest
import torch

from cpr.checkpoint.format.manifest import save_folder
from cpr.checkpoint.format.row_file import RowBatch
from cpr.checkpoint.save.writer_thread import CLOSED_AT_ONCE, RankWriter
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import CheckpointError
from cpr.extent import Extent


def rows_of(table):
    rows = RowBatch(first_row=0, ids=None, columns={"weights": torch.ones(3, 4)})
    return Extent.of_table(table, (3, 4)), rows, 7


class Disk(LocalStorage):
    """One on which a file is made durable only when it may be, and that of one table never."""

    def __init__(self, folder, bad=""):
        super().__init__(folder)
        self.bad, self.may_settle = bad, Event()

    @contextmanager
    def create(self, path):
        with super().create(path) as file:
            yield file
            assert self.may_settle.wait(20)
            if self.bad and self.bad in path:
                raise CheckpointError(f"{path} is not durable")


def write_all(writer, *tables):
    for table in tables:
        writer.write(*rows_of(table))
    return writer.finish({})


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_some_files_are_synced_while_the_next_is_written(tmp_path):
    disk = Disk(tmp_path)
    writer = RankWriter(disk, save_folder(1), "exact", with_ids=False)
    tables = [f"table{number}" for number in range(CLOSED_AT_ONCE + 1)]
    for table in tables:
        writer.write(*rows_of(table))  # those before it have not settled
    assert not any(name.endswith(".arrow") for name in names(tmp_path))
    disk.may_settle.set()
    part = writer.finish({})
    assert [entry.path for entry in part.rows] == [f"{table}/r0-c0.arrow" for table in tables]
    assert names(tmp_path) == ["r0-c0.arrow"] * len(tables)


@pytest.mark.parametrize("bad", ["first", "second", "third"])
def test_a_file_that_cannot_be_synced_fails_the_save(tmp_path, bad):
    disk = Disk(tmp_path, bad)
    disk.may_settle.set()
    writer = RankWriter(disk, save_folder(1), "exact", with_ids=False)
    with pytest.raises(CheckpointError, match=f"{bad}.*not durable"):
        write_all(writer, "first", "second", "third")
    writer.abandon()
    assert not any(bad in str(path) for path in tmp_path.rglob("*") if path.is_file())
    assert not any(name.endswith("cpr-tmp") for name in names(tmp_path))
