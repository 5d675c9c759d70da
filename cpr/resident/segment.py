"""Segment: one worker's resident memory, with its tables, status page, replicated state and owner."""

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import xxhash
from torch import Tensor

from cpr.checkpoint.format.tree_file import dtype_name
from cpr.errors import DamagedMemoryError, ResidentMemoryError
from cpr.extent import Extent
from cpr.resident.folders import (
    OWNER_FILE,
    UNSAVED_FILE,
    alone_in,
    is_at,
    open_private,
    reading,
    try_lock,
    why_not_private,
)
from cpr.resident.layout import (
    LAYOUT_FILE,
    REGION_SUFFIX,
    KernelMemory,
    Layout,
    RegionFile,
    StoredShard,
    TensorPlace,
    read_layout,
    region_path,
)
from cpr.resident.regions import create_region, map_region
from cpr.resident.replica import Replica
from cpr.resident.status_page import StatusPage
from cpr.shards.shard import TableShard

MARKS_FILE: Final = "marks"
UNDO_FILE: Final = "undo-"
"""Beginning of the names of files with rows as they were before a step (`cpr.mirror.undo`)."""

_held: set[int] = set()
"""File descriptors of the owner files that this process has locked."""


def _unlock_in_child() -> None:
    # All processes that share the open file hold the lock: a forked data loader would keep a dead worker
    # "alive".
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_unlock_in_child)


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldShard:
    """Rows x columns of a table in resident memory, readable without the model."""

    extent: Extent
    columns: Mapping[str, Tensor]
    """Weights `[num_rows, num_cols]` and optimizer state `[num_rows, ...]`, live in shared memory."""


class Segment:
    """A worker's folder of shared memory; made by `Home.create` and `Home.find`.

    Raises:
        DamagedMemoryError: the folder or its status page was not left by a worker of this user.
        UnreadableMemoryError: they cannot be read now, or were written by another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with reading(folder):
            reason = why_not_private(folder, is_folder=True)
        if reason:
            raise DamagedMemoryError(reason)
        self.status = StatusPage(folder / MARKS_FILE)
        self.replica = Replica(folder, self.status)
        self.kernels: list[KernelMemory] = []
        """Kernels of the tables built here, in order, for the layout."""
        self._companions: dict[str, str] = {}
        self._regions: dict[str, Tensor] = {}
        self._files: dict[str, RegionFile] = {}
        """Entries of the regions in the layout."""
        self._owner: int | None = None

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.name

    @property
    def is_unsaved(self) -> bool:
        """Whether the newest save failed: then the memory is freed only at a user's request."""
        return (self.folder / UNSAVED_FILE).exists()

    def mark_unsaved(self, newest_step: int | None) -> None:
        """Keep the memory even if the run is not restarted, until a step after `newest_step` is saved."""
        with os.fdopen(open_private(self.folder / UNSAVED_FILE, os.O_WRONLY | os.O_CREAT), "w") as marker:
            marker.write(str(-1 if newest_step is None else newest_step))

    def clear_unsaved(self) -> None:
        """Undo `mark_unsaved`."""
        (self.folder / UNSAVED_FILE).unlink(missing_ok=True)

    @property
    def is_claimed(self) -> bool:
        """Whether this process owns the segment."""
        return self._owner in _held

    def claim(self) -> bool:
        """Own this segment until the process ends; False if another process owns it, or it is gone.

        Of several concurrent claims, one succeeds. The status page of the last owner stays.

        Raises:
            UnreadableMemoryError: the owner cannot be determined now.
        """
        with reading(self.folder), alone_in(self.folder.parent) as there:
            return there and self._claim()

    def _claim(self) -> bool:
        if self.is_claimed:
            return True
        path = self.folder / OWNER_FILE
        try:
            file = open_private(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return False
        is_mine = False
        try:
            is_mine = try_lock(file) and is_at(file, path)
        finally:
            if not is_mine:  # also after an error, when the open file may be locked
                os.close(file)
        if is_mine:
            _held.add(file)
            self._owner = file
        return is_mine

    def release(self) -> None:
        """Give up the ownership, as if this process had died; the segment must not be used afterwards."""
        if self._owner is not None and self._owner in _held:
            _held.remove(self._owner)
            os.close(self._owner)
        self._owner = None

    @property
    def layout(self) -> Layout | None:
        """Content of the segment, from its file; None: the segment is not sealed. Raises as `read_layout`."""
        return read_layout(self.folder)

    def region(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Map the file `name` as `[numel]` of `dtype`; a missing file is created with zeros.

        Raises:
            NotEnoughMemoryError: there is no room.
            DamagedMemoryError: the file has another size, or is not private.
            UnreadableMemoryError: the file cannot be mapped now.
        """
        if name not in self._regions:
            path, num_bytes = region_path(self.folder, name), numel * dtype.itemsize
            self._regions[name] = (map_region if os.path.lexists(path) else create_region)(path, num_bytes)
            self._files[name] = RegionFile(num_bytes=num_bytes)
        region = self._regions[name].view(dtype)
        if region.numel() != numel:
            raise DamagedMemoryError(f"{name} has {region.numel()} elements instead of {numel}")
        return region

    def companion(self, name: str, dtype: torch.dtype, numel: int, adopt: bool) -> tuple[Tensor, bool]:
        """Allocate memory that is sealed, and taken over, with the tables; between build and `seal`.

        `adopt` takes over memory of this name and size from the layout, if there is any.

        Returns:
            `[numel]` of `dtype`, and whether it was taken over; zeros if not.

        Raises:
            NotEnoughMemoryError: there is no room.
            DamagedMemoryError: the segment differs from what was sealed.
        """
        layout = self.layout if adopt else None
        file = layout.companions.get(name) if layout is not None else None
        if layout is None or file is None or layout.files[file].num_bytes != numel * dtype.itemsize:
            file, layout = f"companion-{secrets.token_hex(4)}", None
        self._companions[name] = file
        return self.region(file, dtype, numel), layout is not None

    def begin_build(self) -> None:
        """Forget the regions of an earlier model, and free those that no layout names."""
        self._regions.clear()
        self._files.clear()
        self.kernels.clear()
        self._companions.clear()
        self.tidy()

    def seal(
        self,
        *,
        session_id: str,
        rank: int,
        world_size: int,
        generation: int,
        shards: Sequence[TableShard],
        is_mirror: bool = False,
    ) -> list[str]:
        """Make this segment count: the content of these shards is complete.

        `is_mirror`: they are the copy of another worker's, whose rank is given.

        Returns:
            Names of sharded tables' shards outside of this segment, such as tables on a GPU, which would not
            survive this process.
        """
        placed = {shard.name: self._placed(shard) for shard in shards}
        found = tuple(shard for shard in placed.values() if shard)
        outside = [shard for shard in shards if not placed[shard.name] and not shard.replicated]
        used = {file for kernel in self.kernels for file in kernel.files.values()}
        used |= {place.file for shard in found for place in shard.columns.values()}
        used |= set(self._companions.values())
        Layout(
            session_id=session_id,
            rank=rank,
            world_size=world_size,
            generation=generation,
            files={name: self._files[name] for name in sorted(used)},
            kernels=tuple(self.kernels),
            shards=found,
            companions=dict(self._companions),
            outside_bytes=sum(column.nbytes for shard in outside for column in shard.columns.values()),
            is_mirror=is_mirror,
        ).write(self.folder)
        self.tidy()
        return [shard.name for shard in outside]

    def unseal(self) -> None:
        """Make this segment count no longer: call it before sealed content is overwritten."""
        (self.folder / LAYOUT_FILE).unlink(missing_ok=True)

    def forget_past(self) -> None:
        """Keep what goes back to earlier steps no longer: rows were written from outside, or others' were."""
        self.forget_changes()
        self.replica.forget_past()

    def forget_changes(self) -> None:
        """Keep what undoes changes of rows no longer."""
        for path in self.folder.glob(f"{UNDO_FILE}*"):
            path.unlink()

    def held_shards(self) -> list[HeldShard]:
        """Map the shards of the segment; none if the segment is not sealed.

        Only copies made when the worker left, which have a digest, are read. A copy is left out if the worker
        began another step after it.

        Raises:
            DamagedMemoryError: a file differs from what was sealed.
            UnreadableMemoryError: a file cannot be read now.
        """
        layout = self.layout
        if layout is None:
            return []
        regions = {
            name: map_region(region_path(self.folder, name), file.num_bytes)
            for name, file in layout.files.items()
            if file.update_begun in {None, self.status.update_begun}
        }
        for name, region in regions.items():
            expected = layout.files[name].digest
            if expected is not None and digest(region) != expected:  # live tables have none: they are large
                raise DamagedMemoryError(f"{region_path(self.folder, name)} differs from its digest")
        return [
            HeldShard(
                extent=shard.extent,
                columns={name: place.view(regions[place.file]) for name, place in shard.columns.items()},
            )
            for shard in layout.shards
            if all(place.file in regions for place in shard.columns.values())
        ]

    def holds(self, shard: TableShard) -> bool:
        """Whether a live shard lies entirely in this segment."""
        return self._placed(shard) is not None

    def set_digest(self, name: str) -> None:
        """Note the digest of a region and the step of its content, for the next `seal`; see `held_shards`."""
        self._files[name] = replace(
            self._files[name], digest=digest(self._regions[name]), update_begun=self.status.update_begun
        )

    def set_aside(self, name: str, new_name: str) -> Tensor:
        """Rename a mapped region, and leave an equal copy of its file under the old name.

        A layout that names the old file stays valid at every moment.

        Returns:
            The region, `[bytes]` uint8, free to be overwritten.

        Raises:
            NotEnoughMemoryError: there is no room for the copy; nothing has changed.
        """
        region = self._regions[name]
        path, copy_path = region_path(self.folder, name), region_path(self.folder, f"{new_name}-copy")
        create_region(copy_path, region.numel()).copy_(region)
        region_path(self.folder, new_name).hardlink_to(path)
        copy_path.replace(path)
        self._regions[new_name] = self._regions.pop(name)
        self._files[new_name] = self._files.pop(name)
        return region

    def tidy(self) -> None:
        """Remove region files that neither the layout nor this process uses."""
        layout = self.layout
        named = {
            region_path(self.folder, name) for name in [*(layout.files if layout else ()), *self._regions]
        }
        for path in self.folder.glob(f"*{REGION_SUFFIX}"):
            if path not in named:
                path.unlink()

    def remove(self) -> None:
        """Free the memory, except what processes have mapped, and give up the ownership.

        Raises:
            ResidentMemoryError: another process owns the segment.
        """
        with alone_in(self.folder.parent) as there:
            if there and self.folder.is_dir():
                if not self._claim():
                    raise ResidentMemoryError(
                        f"{self.folder} cannot be removed: process {self.status.pid} owns it"
                    )
                shutil.rmtree(self.folder)
        self.release()

    def _placed(self, shard: TableShard) -> StoredShard | None:
        """Positions of a shard's columns; None if some lie elsewhere."""
        columns = {name: self._find(tensor) for name, tensor in shard.columns.items()}
        found = {name: place for name, place in columns.items() if place}
        if len(found) < len(columns):
            return None
        return StoredShard(extent=shard.extent, columns=found)

    def _find(self, tensor: Tensor) -> TensorPlace | None:
        """Position of a tensor in a region, found by its address."""
        for name, region in self._regions.items():
            offset = tensor.data_ptr() - region.data_ptr()
            if tensor.device.type == "cpu" and 0 <= offset < max(region.numel(), 1):
                assert tensor.is_contiguous(), f"{name}: {tensor.stride()}"
                assert offset % tensor.element_size() == 0, f"{name}: {offset}"
                return TensorPlace(
                    file=name,
                    offset=offset // tensor.element_size(),
                    shape=tuple(tensor.shape),
                    dtype=dtype_name(tensor),
                )
        return None


def digest(region: Tensor) -> str:
    """XXH3-128 of a mapped file, `[bytes]` uint8."""
    return xxhash.xxh3_128_hexdigest(region.numpy().data)
