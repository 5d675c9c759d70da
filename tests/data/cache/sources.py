"""A source of row groups that can be watched and stopped, for the tests of the cache."""

import threading

from data.dataset import read_manifest
from data.loader import ParquetSource

GROUPS = ((400, 300), (500,), (200, 200))
READS = [(part, group) for part, sizes in enumerate(GROUPS) for group in range(len(sizes))]


class CountingSource:
    """Counts what is read from the data set, and can be made to wait."""

    def __init__(self, folder):
        self.folder, self.manifest = folder, read_manifest(str(folder))
        self._inner = ParquetSource(str(folder), self.manifest)
        self.columns = self._inner.columns
        self.reads = []
        self.gate = threading.Event()
        self.gate.set()

    def read(self, part, row_group):
        self.reads.append((self.manifest.parts.index(part), row_group))
        self.gate.wait(30)
        return self._inner.read(part, row_group)
