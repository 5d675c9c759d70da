"""Checks of one node by itself: packages, shared memory, limits, GPUs, storage."""

import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from cpr.checkpoint.storage.base import open_storage, read_file
from cpr.doctor.finding import Finding, problem, warning
from cpr.errors import CheckpointError
from cpr.humanize import size_text
from cpr.resident.cleanup import occupied
from cpr.resident.folders import ROOT_VARIABLE, user_folder

VERSIONS: Final = (sys.executable, "-m", "cpr.versions")
"""In a process of its own: libraries that do not fit may end theirs."""
LEAST_MEMORY_BYTES: Final = 10**9
"""Containers get 64 MB of shared memory by default, which is too little for any job."""
LEAST_FILES: Final = 4096
"""For connections to all ranks in several process groups, files of tables, and data files."""
UNLIMITED_BYTES: Final = 2**60
"""Control groups of version 1 have a huge number instead of no limit."""
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs", "hugetlbfs")


def node_findings(needed_bytes: int | None, uri: str | None) -> list[Finding]:
    """Check this node.

    Args:
        needed_bytes: shared memory that the job takes on this node; None: not known.
        uri: checkpoint directory to try; None: none.
    """
    files, locked = (
        resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    left_over = sum(run.num_bytes for run in occupied() if not run.in_use_by)
    found = [
        check_versions([*VERSIONS, "cuda" if gpus else "cpu"]),
        check_shared_memory(user_folder().parent, needed_bytes, memory_limit_bytes(), left_over),
        check_open_files(files),
        check_locked_memory(locked, has_rdma=any(Path("/sys/class/infiniband").glob("*"))),
        check_gpus(gpus, has_driver=Path("/proc/driver/nvidia/version").exists()),
    ]
    return found if uri is None else [*found, check_storage(uri)]


def check_versions(command: Sequence[str]) -> Finding:
    """Check that the installed torch, torchrec and fbgemm fit together, by a command that tells."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = done.stderr.strip() or f"{' '.join(command)} ended with code {done.returncode}"
        return problem("versions", text, "install versions that fit together (requirements/README.md)")
    return Finding("versions", f"Python {sys.version.split()[0]}. {done.stdout.strip()}")


def memory_limit_bytes(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Least memory limit of the control groups of this process, of version 1 or 2; None without a limit."""
    limits = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            group = root / controllers / path.strip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return min((limit for limit in limits if limit < UNLIMITED_BYTES), default=None)


def check_shared_memory(
    folder: Path, needed_bytes: int | None, limit_bytes: int | None, left_over_bytes: int
) -> Finding:
    """Check that tables have room in shared memory.

    Args:
        folder: where the memory file system is mounted.
        needed_bytes: what the job takes on this node; None: not known.
        limit_bytes: memory limit of this process's control group, to which shared memory counts; None: none.
        left_over_bytes: what dead runs hold.
    """
    status = os.statvfs(folder)
    size, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
    _, kind = max(reversed(above), key=lambda mount: len(mount[0]))  # a later mount covers an earlier one
    limit = "none" if limit_bytes is None else size_text(limit_bytes)
    text = (
        f"{folder} ({kind}): {size_text(free)} of {size_text(size)} free; memory limit of the control group: "
        f"{limit}; held by dead runs: {size_text(left_over_bytes)}"
    )
    needed = needed_bytes or LEAST_MEMORY_BYTES
    if kind not in MEMORY_FILE_SYSTEMS:
        return problem("shared memory", text, f"name a memory file system (tmpfs) in {ROOT_VARIABLE}")
    if free < needed:
        advice = (
            f"{'`cpr clean --yes`, or ' * bool(left_over_bytes)}enlarge it to {size_text(needed)} or more: "
        )
        advice += "`mount -o remount,size=...`; Docker: --shm-size; Kubernetes: emptyDir of medium Memory"
        return problem("shared memory", text, advice)
    if limit_bytes is not None and limit_bytes < needed:
        return problem(
            "shared memory", text, f"raise the limit to {size_text(needed)} or more (Slurm: --mem)"
        )
    if left_over_bytes:
        return warning("shared memory", text, "`cpr clean` lists it, and says how to save or remove it")
    return Finding("shared memory", text)


def check_open_files(limit: int) -> Finding:
    """Check the soft limit of open files; -1: none."""
    text = f"limit {'none' if limit < 0 else limit}"
    if 0 <= limit < LEAST_FILES:
        return warning("open files", text, "raise it: `ulimit -n 65536`, or LimitNOFILE of the daemon")
    return Finding("open files", text)


def check_locked_memory(limit_bytes: int, has_rdma: bool) -> Finding:
    """Check the soft limit of locked memory, -1 for none; only RDMA (InfiniBand, RoCE) asks for more."""
    text = (
        f"limit {'none' if limit_bytes < 0 else size_text(limit_bytes)}; {'RDMA' if has_rdma else 'no RDMA'}"
    )
    if has_rdma and limit_bytes >= 0:
        return problem("locked memory", text, "`ulimit -l unlimited`, or LimitMEMLOCK=infinity of the daemon")
    return Finding("locked memory", text)


def check_gpus(names: Sequence[str], has_driver: bool) -> Finding:
    """Check that torch sees the GPUs of a machine that has NVIDIA's driver."""
    if has_driver and not names:
        advice = "install the CUDA build of torch; look at CUDA_VISIBLE_DEVICES and `nvidia-smi`"
        return problem("GPUs", "NVIDIA's driver is here, but torch sees no GPU", advice)
    return Finding("GPUs", f"{len(names)} {', '.join(sorted(set(names)))}".strip())


def check_storage(uri: str) -> Finding:
    """Check that a checkpoint directory keeps what its ownership relies on: atomic writes, seen at once.

    A file is written, replaced and deleted, and another client looks after each.

    Raises:
        ValueError: no storage can be opened for this URI.
    """
    folder, data, wrong = f"doctor-{secrets.token_hex(4)}", b"", set()
    path = f"{folder}/record"
    try:
        writer, reader = open_storage(uri), open_storage(uri)
        try:
            for data in (b"first", b"replaced"):
                with writer.create(path) as sink:
                    sink.write(memoryview(data))
                if list(reader.list(folder)) != ["record"] or read_file(reader, path) != data:
                    wrong.add("a file that was written is not seen at once")
            with suppress(InterruptedError), writer.create(path) as sink:
                sink.write(memoryview(b"half"))
                raise InterruptedError
            if read_file(reader, path) != data:
                wrong.add("an interrupted write has replaced a file")
        finally:
            writer.delete(folder)
        if list(reader.list(folder)):
            wrong.add("a file that was deleted is still listed")
    except CheckpointError as error:
        return Finding("storage", str(error), "PROBLEM")
    if wrong:
        return problem("storage", f"{writer.uri}: {'; '.join(sorted(wrong))}", "take one that is consistent")
    return Finding("storage", f"{writer.uri}: writes are atomic, and seen at once")
