"""Histories of a folder of which parts are away, played against the code that decides: all counts once."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import polars as pl
from hypothesis.stateful import initialize, rule

from data.stream import files
from data.stream.agreement import Rules
from data.stream.folder import FolderStream
from data.stream.listing import PATIENCE_S, SETTLE_S
from data.stream.reader import ReaderConfig
from data.stream.units import Unit
from tests.data.stream.folders import Clock
from tests.data.stream.histories import RankHistories, play
from tests.data.stream.streams import MANIFEST

PARTS = ("", "a", "b")
"""The first is the folder itself, which is never away."""
PIECE = 4


class FolderHistories(RankHistories):
    """Files arrive in parts of a folder, which go and come back; some are deleted."""

    clock: Clock

    @initialize(batch=st.integers(5, 16), ahead=st.integers(1, 40), chunk=st.integers(1, 9))
    def set_up(self, batch: int, ahead: int, chunk: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        for part in PARTS:
            (self.root / "in" / part).mkdir(parents=True, exist_ok=True)
        self.files: dict[str, range] = {}
        """Ids of the files that were written, by their paths."""
        self.deleted: dict[str, range] = {}
        self.num_written = 0
        self.begin(
            lambda: FolderStream(str(self.root / "in"), MANIFEST, "nowhere", is_encoded=True, now=self.clock),
            Rules(global_batch=batch, wait_s=0.0, end_after_s=None),
            ReaderConfig(ahead=ahead, chunk=chunk),
        )

    @rule(
        parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=4),
        count=st.integers(1, 12),
        age_s=st.sampled_from([0, 0, 0, 5, 20]),
    )
    def arrive(self, parts: Sequence[str], count: int, age_s: int) -> None:
        for part in parts:
            if (self.root / "in" / part).exists():
                self.write(part, count, age_s)

    def write(self, part: str, count: int, age_s: int) -> None:
        path = f"{part}/{len(self.files)}.parquet".strip("/")
        ids = range(self.num_written, self.num_written + count)
        self.num_written += count
        columns = {"label": [each % 2 for each in ids], "price": [0.5] * count, "item": list(ids)}
        pl.DataFrame(columns).write_parquet(self.root / "in" / path)
        written_s = self.clock.now_s - age_s
        os.utime(self.root / "in" / path, (written_s, written_s))
        self.files[path] = ids

    @rule(seconds=st.sampled_from([1, 4, 10, 40]), rounds=st.integers(0, 6))
    def live(self, seconds: int, rounds: int) -> None:
        self.clock.now_s += seconds
        for _ in range(rounds):
            for reader in self.readers:
                reader.read_once()
            self.step()

    @rule(part=st.sampled_from(PARTS[1:]))
    def go_or_come(self, part: str) -> None:
        here, away = self.root / "in" / part, self.root / part
        here.rename(away) if here.exists() else away.rename(here)

    @rule(which=st.integers(0, 100))
    def delete(self, which: int) -> None:
        left = [path for path in self.files if (self.root / "in" / path).exists()]
        if left and len(self.files) - len(self.deleted) > 1:  # an empty folder is waited for, for ever
            path = left[which % len(left)]
            (self.root / "in" / path).unlink()
            self.deleted[path] = self.files[path]

    def teardown(self) -> None:
        if not hasattr(self, "names"):
            return
        for part in PARTS[1:]:
            if (self.root / part).exists():
                self.go_or_come(part)
        for _ in range(4):
            self.clock.now_s += SETTLE_S + PATIENCE_S / 2
            self.drain()
        for reader in self.readers:
            assert reader.offer(0).waiting == 0
            self.states |= reader._states
        lost = {each for ids in self.files.values() for each in ids} - set(self.trained)
        known = {
            self.files[unit.path][record]
            for each in self.known.values()
            for unit in (Unit.of(found.unit) for found in each.known.units)
            for record in range(unit.begin, min(unit.begin + PIECE, len(self.files[unit.path])))
        }
        deleted = {each for ids in self.deleted.values() for each in ids}
        uncounted = deleted - known
        left_out = self.late + sum(each.left_out for each in self.states.values())
        assert sum(each.bad for each in self.states.values()) == 0
        assert left_out == len(lost - uncounted), "what no run has ever seen cannot be counted"
        shutil.rmtree(self.root)


def test_histories_of_a_folder(clock, monkeypatch) -> None:
    monkeypatch.setattr(files, "PIECE_RECORDS", PIECE)
    FolderHistories.clock = clock
    play(FolderHistories, max_examples=80)
