"""Copy of the newest replicated state, in two slots or more: some are whole while another is written.

A slot is a file: five numbers in a header, the leaves' bytes at multiples of 64, and then the tree as JSON
(see `cpr.checkpoint.format.tree_file`). The status page names the slot that counts, so that a kill while
another is written changes nothing.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.checkpoint.format.tree_file import DAMAGE, NUMBERS, Array, Leaf, decode, dtype_name, encode
from cpr.errors import DamagedMemoryError, NotEnoughMemoryError
from cpr.resident.folders import other_version, unreadable
from cpr.resident.regions import grow_region, map_region
from cpr.resident.status_page import NOTHING, StatusPage

MAGIC_BYTES: Final = b"CPRSLOT1"
"""The last byte is the version."""
MAGIC: Final = int.from_bytes(MAGIC_BYTES, "little")
HEADER_BYTES: Final = 64
ALIGNMENT: Final = 64
FILE: Final = "replica-"
SPARE: Final = 1.25
"""A slot that must grow gets this factor more than it needs."""
Kind = tuple[str, tuple[int, ...]]
"""Dtype ("float32" of torch, "<f4" of numpy, or "bytes") and shape of a leaf."""


@dataclass(eq=False)
class _Slot:
    """One of the files, mapped for writing."""

    path: Path
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    forms: list[Any] = field(default_factory=list)
    """Forms of the leaves that `targets` fit."""
    kinds: str = "[]"
    """Kinds of these leaves, as JSON."""
    targets: list[Tensor | Array] = field(default_factory=list)
    """Where each leaf is copied to."""
    written: dict[int, bytes] = field(default_factory=dict)
    """Objects that were copied to targets of `bytes`, which never change, by number of the target."""
    end: int = HEADER_BYTES
    """Offset of the end of the leaves."""

    def reserve(self, num_bytes: int) -> None:
        if self.memory.numel() < num_bytes:
            self.memory = grow_region(self.path, int(num_bytes * SPARE))
            self.forms = []  # the targets are in the old mapping

    def lay_out(self, leaves: Sequence[Leaf]) -> None:
        """Make room for these leaves, in order."""
        kinds = [_kind(leaf.value) for leaf in leaves]
        places, end = _places(kinds)
        self.reserve(end)
        self.end = end  # not before there is room: the targets would still be those of other leaves
        self.written = {}
        self.targets = [_target(self.memory, kind, at) for kind, at in zip(kinds, places, strict=True)]
        self.kinds, self.forms = json.dumps(kinds), [_form(leaf.value) for leaf in leaves]

    @property
    def header(self) -> Array:
        """Magic number, step, and of the JSON: bytes, CRC and offset."""
        return self.memory[:HEADER_BYTES].numpy().view(np.int64)


class Replica:
    """The slots of a segment."""

    def __init__(self, folder: Path, status: StatusPage) -> None:
        self._folder, self._status = folder, status
        self._slots = [_Slot(folder / f"{FILE}{number}") for number in range(2)]

    def keep(self, num_states: int) -> None:
        """Keep so many of the newest states, instead of one, and claim memory for them, as much as one takes.

        Raises:
            NotEnoughMemoryError: there is no room; as many are kept as before.
        """
        num_bytes = self._slots[self._status.slot].memory.numel()
        more = [_Slot(self._folder / f"{FILE}{number}") for number in range(len(self._slots), num_states + 1)]
        try:
            for slot in (*self._slots, *more):
                slot.reserve(num_bytes)
        except NotEnoughMemoryError:
            for slot in more:
                slot.path.unlink(missing_ok=True)
            raise
        self._slots += more

    def forget_past(self) -> None:
        """Let no state count but the newest."""
        for number, path in self._files():
            if number != self._status.slot:
                path.unlink()
                if number < len(self._slots):
                    self._slots[number] = _Slot(path)

    def steps(self) -> dict[int, int]:
        """Slots that are whole, by training steps done; the newest state is one of them.

        Raises:
            UnreadableMemoryError: a slot cannot be read now.
        """
        found, files, newest = {}, self._files(), self._status.slot
        for number, path in sorted(files, key=lambda each: (each[0] - newest - 1) % (files[-1][0] + 1)):
            memory = map_region(path)
            if memory.numel() >= HEADER_BYTES:
                magic, step = memory[:16].numpy().view(np.int64).tolist()
                if magic == MAGIC:
                    found[step] = number  # of a step that was written twice, the newer one, which comes later
        return found

    def go_back(self, step: int) -> None:
        """Make the state of this step, which is one of `steps`, the newest one."""
        self._status.slot = self.steps()[step]

    def _files(self) -> list[tuple[int, Path]]:
        """The files that there are, by number of the slot."""
        return sorted(
            (int(path.name.removeprefix(FILE)), path) for path in self._folder.glob(f"{FILE}[0-9]*")
        )

    def write(self, step: int, tree: Any) -> None:
        """Copy a state, and make the copy count by one store at the very end.

        As long as shapes stay the same, this costs a copy of the bytes and some microseconds a leaf. The tree
        is as in `cpr.checkpoint.format.tree_file`. No reference to it is kept.

        Raises:
            ValueError: something in the tree cannot be saved; says where.
            NotEnoughMemoryError: there is no room; the previous state still counts.
        """
        self.write_leaves(step, *encode(tree))

    def write_leaves(self, step: int, encoded: Any, leaves: Sequence[Leaf]) -> None:
        """Copy an encoded state, see `write`.

        Raises:
            NotEnoughMemoryError: as `write`.
        """
        number = (self._status.slot + 1) % len(self._slots)
        slot = self._slots[number]
        if slot.forms != [_form(leaf.value) for leaf in leaves]:
            slot.lay_out(leaves)
        text = f"[{json.dumps(encoded, allow_nan=False)},{slot.kinds}]".encode()
        if slot.memory.numel() < slot.end + len(text):
            slot.reserve(slot.end + len(text))
            slot.lay_out(leaves)
        slot.header[0] = 0  # not whole
        _copy(leaves, slot.targets, slot.written)
        slot.memory.numpy()[slot.end : slot.end + len(text)] = np.frombuffer(text, np.uint8)
        slot.header[1:5] = step, len(text), zlib.crc32(text), slot.end
        slot.header[0] = MAGIC
        self._status.slot = number

    def read(self) -> tuple[int, Any] | None:
        """Read training steps done and the state then, into new memory; None if none was ever written.

        Raises:
            DamagedMemoryError: the slot differs from what was written.
            UnreadableMemoryError: the slot cannot be read now, or was written by another version.
        """
        number = self._status.slot
        if number == NOTHING:
            return None
        if number < 0:
            raise DamagedMemoryError(f"the status page names slot {number}")
        path = self._folder / f"{FILE}{number}"
        memory = map_region(path)
        magic = memory[: len(MAGIC_BYTES)].numpy().tobytes()
        if magic != MAGIC_BYTES and magic.startswith(MAGIC_BYTES[:-1]):
            raise other_version(path, magic, MAGIC_BYTES)
        try:
            return _read(memory)
        except MemoryError as error:
            raise unreadable(path, error) from error
        except DAMAGE as error:
            raise DamagedMemoryError(f"{path} is damaged ({error})") from error


def _read(memory: Tensor) -> tuple[int, Any]:
    words = memory[:HEADER_BYTES].numpy().view(np.int64)
    magic, step, num_bytes, crc, end = (int(word) for word in words[:5])
    if magic != MAGIC:
        raise ValueError("it is not whole")
    if not (HEADER_BYTES <= end <= end + num_bytes <= memory.numel()):
        raise ValueError("its parts do not fit in it")
    text = memory[end : end + num_bytes].numpy().tobytes()
    if zlib.crc32(text) != crc:
        raise ValueError("its tree differs from its checksum")
    encoded, listed = json.loads(text)
    kinds = [(dtype, tuple(shape)) for dtype, shape in listed]
    places, _ = _places(kinds)

    def leaf(what: str, number: int) -> Any:
        source = _target(memory, kinds[number], places[number])
        if isinstance(source, Tensor):
            return _clone(source)
        return source.tobytes() if what == "bytes" else source.copy()

    return step, decode(encoded, leaf)


def _clone(source: Tensor) -> Tensor:
    try:
        return source.clone()
    except RuntimeError as error:  # raised by PyTorch for a lack of memory, which is no damage
        raise MemoryError(str(error)) from error


def _form(value: Tensor | Array | bytes) -> Any:
    """Value that is equal for leaves of one `Kind`, and faster to make."""
    return len(value) if isinstance(value, bytes) else (value.dtype, value.shape)


def _kind(value: Tensor | Array | bytes) -> Kind:
    if isinstance(value, Tensor):
        return dtype_name(value), tuple(value.shape)
    if isinstance(value, bytes):
        return "bytes", (len(value),)
    return value.dtype.str, value.shape


def _dtype(name: str) -> torch.dtype | np.dtype[Any]:
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return found
    dtype = np.dtype(np.uint8 if name == "bytes" else name)
    if dtype.kind not in NUMBERS:
        raise ValueError(f"it has a leaf of dtype {name!r}")
    return dtype


def _places(kinds: Sequence[Kind]) -> tuple[list[int], int]:
    """Offsets of the leaves, and of the end of the last one."""
    places, end = [], HEADER_BYTES
    for name, shape in kinds:
        places.append(end)
        end += -(-_num_bytes(name, shape) // ALIGNMENT) * ALIGNMENT
    return places, end


def _num_bytes(name: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * _dtype(name).itemsize


def _target(memory: Tensor, kind: Kind, place: int) -> Tensor | Array:
    name, shape = kind
    dtype = _dtype(name)
    data = memory[place : place + _num_bytes(name, shape)]
    if isinstance(dtype, torch.dtype):
        return data.view(dtype).view(shape)
    return data.numpy().view(dtype).reshape(shape)


def _copy(leaves: Sequence[Leaf], targets: Sequence[Tensor | Array], written: dict[int, bytes]) -> None:
    to_tensors: list[Tensor] = []
    from_tensors: list[Tensor] = []
    for number, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if isinstance(target, Tensor):
            assert isinstance(leaf.value, Tensor)
            to_tensors.append(target)
            from_tensors.append(leaf.value)
        elif isinstance(leaf.value, bytes):
            if written.get(number) is not leaf.value:
                target[...] = np.frombuffer(leaf.value, np.uint8)
                written[number] = leaf.value
        else:
            target[...] = leaf.value
    if to_tensors:
        with torch.no_grad():
            torch._foreach_copy_(to_tensors, from_tensors)  # one call is faster than one for each
