"""The text of a raw file, plain, gzip or zstd by its first bytes, as a stream with its day starts."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import zstandard

from data.jobs.location import Location

_READ_BYTES: Final = 64 << 10
"""Stored bytes that are decompressed at once."""
_MAX_TRAILING_BYTES: Final = 64 << 10
"""Limit of bytes after the compressed data; more of them count as damaged compressed data."""


class Compression(NamedTuple):
    """A compression format of raw files."""

    magics: tuple[bytes, ...]
    """First bytes of a member or frame."""
    new: Callable[[], Any]
    """Makes the decompressor of one member or frame, as `zlib.decompressobj` does."""


_CODECS: Final = (
    Compression((b"\x1f\x8b\x08",), lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)),
    Compression(
        # A frame, or one of the sixteen kinds of frames to be skipped (RFC 8878).
        (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + kind]) + b"\x2a\x4d\x18" for kind in range(16))),
        lambda: zstandard.ZstdDecompressor().decompressobj(),
    ),
)
_MAGIC_BYTES: Final = 4


class Content:
    """The text of an uncompressed file as a stream.

    Args:
        path: the file.
        day_starts: stored bytes at which its days start, the first one 0.
    """

    def __init__(self, path: Location, day_starts: Sequence[int]) -> None:
        self._file = path.open()
        self.day_starts = list(day_starts)
        """Bytes of the text at which days start, as far as it has been read."""
        self.stored_position = 0
        """Bytes of the stored file consumed."""
        self.damage: str | None = None
        """Reason of a damaged or truncated file; None if intact."""
        self.trailing = b""
        """Bytes after the compressed data; known at the end of the text."""

    def readinto(self, target: memoryview) -> int:
        """Read the next bytes into `target`; returns their number, 0 at the end or where it is damaged."""
        size = self._file.readinto(target)
        self.stored_position += size
        return size

    def skip_to(self, offset: int) -> None:
        """Move forward to a byte of the text."""
        self.stored_position = self._file.seek(offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CompressedContent(Content):
    """The text of a gzip (also of several members) or zstd (also of several frames) file.

    As with `gzip -d`, the text ends where the following bytes start no other member or frame. Input is read
    up to each day's first stored byte before the text up to there is returned, so that the text offset of a
    day's start depends on the file alone.
    """

    def __init__(self, path: Location, compression: Compression, day_starts: Sequence[int]) -> None:
        super().__init__(path, [0])
        self._compression = compression
        self._stored_bounds = [start for start in day_starts if start > 0]
        self._decompressor: Any = None
        self._ready = memoryview(b"")
        self._text_bytes = 0  # all text produced so far, handed out or not

    def readinto(self, target: memoryview) -> int:
        """See `Content.readinto`."""
        while not self._ready and self._decompress_more():
            pass
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def skip_to(self, offset: int) -> None:
        """Decompress and drop the text before `offset`."""
        scratch = memoryview(bytearray(1 << 20))
        position = self._text_bytes - len(self._ready)
        while position < offset:
            got = self.readinto(scratch[: offset - position])
            if not got:
                return
            position += got

    def _decompress_more(self) -> bool:
        """Decompress one more read of the file. False where there is no more text."""
        while self._stored_bounds and self._stored_bounds[0] <= self.stored_position:
            self._stored_bounds.pop(0)
            self.day_starts.append(self._text_bytes)
        bound = self._stored_bounds[0] if self._stored_bounds else self.stored_position + _READ_BYTES
        ended = self.damage or self.trailing
        stored = self._file.read(min(_READ_BYTES, bound - self.stored_position)) if not ended else b""
        if not stored:
            if self._decompressor is not None and self.damage is None:
                self.damage = "the compressed data ends in the middle"
            return False
        self.stored_position += len(stored)
        self._ready = memoryview(b"".join(self._decompress(stored)))
        self._text_bytes += len(self._ready)
        return True

    def _decompress(self, stored: bytes) -> Iterator[bytes]:
        """Decompress `stored`, up to its damage if there is any."""
        while stored:
            if self._decompressor is None:
                stored = stored.lstrip(b"\0")  # tape blocks are padded so, and gzip takes it
                if not stored:
                    return
                if not self._begins_another(stored):
                    self._end_before(stored)
                    return
                self._decompressor = self._compression.new()
            try:
                yield self._decompressor.decompress(stored)
            except (zlib.error, zstandard.ZstdError) as error:
                self.damage = f"the compressed data is damaged ({error})"
                return
            stored = b""
            if self._decompressor.eof:
                stored = self._decompressor.unused_data
                self._decompressor = None

    def _begins_another(self, stored: bytes) -> bool:
        """Whether a member or frame begins with `stored`, or with what is left of the file."""
        if len(stored) < _MAGIC_BYTES:
            stored += self._file.read(_MAGIC_BYTES)
            self._file.seek(self.stored_position)
        return any(stored.startswith(magic) or magic.startswith(stored) for magic in self._compression.magics)

    def _end_before(self, stored: bytes) -> None:
        """End the text before `stored`, which is not compressed data."""
        trailing = stored + self._file.read(_MAX_TRAILING_BYTES)
        self.stored_position += len(trailing) - len(stored)
        if len(trailing) > _MAX_TRAILING_BYTES:
            self.damage = f"{_MAX_TRAILING_BYTES >> 10} KiB and more follow that are not compressed data"
        else:
            self.trailing = trailing


def codec_of(path: Location) -> Compression | None:
    """The compression format of a file, by its first bytes; None for a plain file."""
    with path.open() as file:
        head = file.read(_MAGIC_BYTES)
    return next((codec for codec in _CODECS if head.startswith(codec.magics)), None)


def open_content(path: Location, day_starts: Sequence[int]) -> Content:
    """The text of a raw file; see `Content`."""
    codec = codec_of(path)
    return CompressedContent(path, codec, day_starts) if codec else Content(path, day_starts)
