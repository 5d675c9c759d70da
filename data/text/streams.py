r"""Reads whole lines of a raw file in blocks of bounded size, however long the file or a line is."""

import bisect
import codecs
from collections.abc import Callable, Iterator
from typing import Final

from data.text.content import Content

MAX_LINE_BYTES: Final = 1 << 20
"""A longer line is refused whatever it holds, so that a file without line ends cannot fill the memory."""
_KEPT_BYTES: Final = MAX_LINE_BYTES + 2
r"""Kept bytes of a too long line, which is still too long without a `\r\n`."""


class LineReader:
    r"""Splits a content into blocks of whole lines.

    Args:
        content: the text, at a line's start.
        offset: the byte of the text at which it stands.
        block_bytes: size of a block; only a longer line makes a longer one.
    """

    def __init__(self, content: Content, offset: int, block_bytes: int) -> None:
        self.content = content
        self._buffer = bytearray(block_bytes)  # reused for all blocks, as fresh memory is slow at first use
        self._size = 0  # bytes of it that are filled
        self._at_end = False
        self.partial = b""
        """The incomplete line at the end of a damaged content."""
        self.offset = offset
        """Byte of the text at which the next line starts."""

    def skip_partial_line(self) -> None:
        """Drop the rest of a line that starts before the content's position."""
        while not self.exhausted:
            cut = self._buffer.find(b"\n", 0, self._size) + 1
            self._drop(cut or self._size)
            if cut:
                return

    @property
    def day(self) -> int:
        """Position among the content's days of the next line's day; reads ahead as needed."""
        self._fill()
        return bisect.bisect_right(self.content.day_starts, self.offset) - 1

    @property
    def exhausted(self) -> bool:
        """Whether no line is left; reads ahead as needed."""
        self._fill()
        return self._at_end and not self._size

    def day_end(self, start: int) -> int | None:
        """End of the day of byte `start`; None if it is not known yet."""
        position = bisect.bisect_right(self.content.day_starts, start)
        return self.content.day_starts[position] if position < len(self.content.day_starts) else None

    def blocks(self, limit: Callable[[], int | None]) -> Iterator[bytes]:
        r"""The lines that start before `limit`, in blocks; every line ended by `\n`.

        A byte order mark of UTF-8 at the start of the text is left out.

        Args:
            limit: gives that byte of the text, or None as long as it is not known; asked for every block.
        """
        while not self.exhausted:
            end = limit()
            if end is not None and self.offset >= end:
                return
            at_start = self.offset == 0
            block = self._take(end)
            yield block.removeprefix(codecs.BOM_UTF8) if at_start else block

    def _fill(self) -> None:
        with memoryview(self._buffer) as view:
            while self._size < len(view) and not self._at_end:
                got = self.content.readinto(view[self._size :])
                self._at_end = not got
                self._size += got
        if self._at_end and self.content.damage:
            cut = self._buffer.rfind(b"\n", 0, self._size) + 1
            self.partial = self.partial or bytes(self._buffer[cut : self._size])
            self._size = cut

    def _take(self, end: int | None) -> bytes:
        """Take whole lines off the buffer, at least one, all that start before `end`."""
        cut = 0
        if end is not None and end - self.offset < self._size:
            # the last of them holds byte `end - 1` and may end beyond the buffer
            cut = self._buffer.find(b"\n", end - self.offset - 1, self._size) + 1
        cut = cut or self._buffer.rfind(b"\n", 0, self._size) + 1
        return self._drop(cut) if cut else self._take_long()

    def _take_long(self) -> bytes:
        """Read the rest of a line that fills the buffer, and keep only the bytes that a bad line needs."""
        kept = self._drop(self._size)
        while not self.exhausted:
            cut = self._buffer.find(b"\n", 0, self._size) + 1
            kept = (kept + self._drop(cut or self._size))[: _KEPT_BYTES + 1]
            if cut:
                break
        else:
            if self.content.damage:
                self.partial = (kept + self.partial)[:_KEPT_BYTES]
                return b""
        return kept if kept.endswith(b"\n") else kept[:_KEPT_BYTES] + b"\n"

    def _drop(self, cut: int) -> bytes:
        """Take the first `cut` bytes off the buffer."""
        block = bytes(memoryview(self._buffer)[:cut])
        self._buffer[: self._size - cut] = self._buffer[cut : self._size]
        self._size -= cut
        self.offset += cut
        return block
