"""A sink that knows how much went through it, and its digest."""

import xxhash

from cpr.checkpoint.storage.base import Sink


class HashingSink:
    """Passes bytes on to another sink.

    Args:
        sink: where they go.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        """So far."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        self._hash.update(data)
        self.num_bytes += data.nbytes
        self._sink.write(data)

    def digest(self) -> str:
        """XXH3-128 of all bytes so far."""
        return self._hash.hexdigest()
