"""The text of a raw file, plain, .gz or .zst, as a stream that knows where its days start."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import zstandard

_READ_BYTES: Final = 64 << 10
"""Stored bytes that are decompressed at once."""


class Content(Protocol):
    """The text of a raw file as a stream."""

    @property
    def day_starts(self) -> list[int]:
        """Bytes of the text at which days start, as far as it has been read."""

    @property
    def stored_position(self) -> int:
        """Bytes of the stored file consumed."""

    @property
    def damage(self) -> str | None:
        """Why the text ends before its end, or None."""

    def readinto(self, target: memoryview) -> int:
        """Put the next bytes into `target`; how many, 0 at the end."""

    def skip_to(self, offset: int) -> None:
        """Move forward to a byte of the text."""

    def close(self) -> None:
        """Close the file."""


class PlainContent:
    """A file that is its own text."""

    def __init__(self, path: Path, day_starts: Sequence[int]) -> None:
        self._file = path.open("rb", buffering=0)
        self.day_starts = list(day_starts)
        self.damage: str | None = None

    @property
    def stored_position(self) -> int:
        """Bytes of the file consumed."""
        return self._file.tell()

    def readinto(self, target: memoryview) -> int:
        """Put the next bytes into `target`; how many, 0 at the end."""
        return self._file.readinto(target) or 0

    def skip_to(self, offset: int) -> None:
        """Move to a byte of the file."""
        self._file.seek(offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CompressedContent:
    """The text of a .gz (also of several members) or .zst (also of several frames) file.

    Input is read up to each day's first stored byte and no further before the text up to there is
    handed out: so the text offset at which a day starts depends on nothing but the file.
    """

    def __init__(self, path: Path, day_starts: Sequence[int]) -> None:
        self._file: BinaryIO = path.open("rb")
        self._new = _zlib_decompressor if path.suffix == ".gz" else _zstd_decompressor
        self._stored_bounds = [start for start in day_starts if start > 0]
        self._decompressor: _Decompressor | None = None
        self._ready = memoryview(b"")
        self._text_bytes = 0  # all text produced so far, handed out or not
        self.day_starts = [0]
        self.stored_position = 0
        self.damage: str | None = None

    def readinto(self, target: memoryview) -> int:
        """Put the next bytes into `target`; how many, 0 at the end or where the file is damaged."""
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

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _decompress_more(self) -> bool:
        """Decompress one more read of the file. False at its end."""
        while self._stored_bounds and self._stored_bounds[0] <= self.stored_position:
            self._stored_bounds.pop(0)
            self.day_starts.append(self._text_bytes)
        bound = self._stored_bounds[0] if self._stored_bounds else self.stored_position + _READ_BYTES
        stored = self._file.read(min(_READ_BYTES, bound - self.stored_position)) if not self.damage else b""
        if not stored:
            if self._decompressor is not None and self.damage is None:
                self.damage = "the compressed data ends in the middle"
            return False
        self.stored_position += len(stored)
        try:
            self._ready = memoryview(self._decompress(stored))
        except (zlib.error, zstandard.ZstdError) as error:
            self.damage = f"the compressed data is damaged ({error})"
            return False
        self._text_bytes += len(self._ready)
        return True

    def _decompress(self, stored: bytes) -> bytes:
        texts = []
        while stored:
            if self._decompressor is None:
                stored = stored.lstrip(b"\0")  # tape blocks are padded so, and gzip takes it
                if not stored:
                    break
                self._decompressor = self._new()
            texts.append(self._decompressor.decompress(stored))
            stored = b""
            if self._decompressor.eof:
                stored = self._decompressor.unused_data
                self._decompressor = None
        return b"".join(texts)


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _zlib_decompressor() -> _Decompressor:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def _zstd_decompressor() -> _Decompressor:
    return zstandard.ZstdDecompressor().decompressobj()


def open_content(path: Path, day_starts: Sequence[int]) -> Content:
    """The text of a raw file; the suffix says how it is compressed.

    Args:
        path: the file.
        day_starts: stored bytes at which its days start, the first one 0.
    """
    if path.suffix in (".gz", ".zst"):
        return CompressedContent(path, day_starts)
    return PlainContent(path, day_starts)
