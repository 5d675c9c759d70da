"""Checks of one node by itself: packages, shared memory, limits, GPUs, and the checkpoint directory."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cpr.doctor.finding import Finding, problem, warning
from cpr.doctor.storage import check_storage, mount_of
from cpr.humanize import size_text
from cpr.resident.cleanup import occupied
from cpr.resident.folders import ROOT_VARIABLE, user_folder

VERSIONS: Final = (sys.executable, "-m", "cpr.versions")
"""In a process of its own: libraries that do not fit may end theirs."""
LEAST_MEMORY_BYTES: Final = 10**9
"""Containers get 64 MB of shared memory by default, which is too little for any job."""
LEAST_FILES: Final = 4096
"""For connections to all ranks in several process groups, files of tables, and data files."""
MEMORY_FILE_SYSTEMS: Final = ("tmpfs", "ramfs", "hugetlbfs")
HEADROOM: Final = 0.1
"""Share of the tables' memory that should be left beside them, for the processes."""


def node_findings(needed_bytes: int | None, uri: str | None) -> Iterator[Finding]:
    """Check this node.

    Args:
        needed_bytes: shared memory that the job takes on this node; None: not known.
        uri: checkpoint directory to try; None: none.
    """
    has_driver = Path("/proc/driver/nvidia/version").exists()
    yield check_versions([*VERSIONS, "cuda" if has_driver else "cpu"])
    # imported here, so that the line above is out where torch cannot be imported
    import torch  # noqa: PLC0415

    folder = user_folder().parent
    limits = memory_limit_bytes(), available_bytes()
    try:
        yield check_shared_memory(folder, needed_bytes, *limits, left_behind())
    except OSError as error:
        yield problem(
            "shared memory",
            f"{folder} ({ROOT_VARIABLE}) cannot be used: {error.strerror or error}",
            f"mend that, or name a memory file system (tmpfs) in {ROOT_VARIABLE}, or unset it",
        )
    files, locked = (
        resource.getrlimit(each)[0] for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    yield check_open_files(files)
    yield check_locked_memory(locked, has_rdma=any(Path("/sys/class/infiniband").glob("*")))
    names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    yield check_gpus(names, has_driver)
    if uri is not None:
        yield check_storage(uri, needed_bytes)


def check_versions(command: Sequence[str]) -> Finding:
    """Check that the installed torch, torchrec and fbgemm fit together, by a command that tells."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = done.stderr.strip() or f"{' '.join(command)} ended with code {done.returncode}"
        return problem("versions", text, "as it says; what fits together stands in requirements/README.md")
    return Finding("versions", f"Python {sys.version.split()[0]}. {done.stdout.strip()}")


def memory_limit_bytes(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of this machine, or the least limit of the control groups (version 1 or 2) of this process."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in {"", "memory"}:
            group = root / controllers / path.strip("/")
            name = "memory.limit_in_bytes" if controllers else "memory.max"
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((folder / name).read_text()))
    return min(limits)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory of this machine that programs can still take."""
    (line,) = (line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def left_behind() -> tuple[int, int]:
    """Bytes of shared memory of this user's dead runs: what the next start frees, and what a user must free.

    Raises:
        PermissionError: the user's folder belongs to another user, or is open to others.
    """
    dead = [run for run in occupied() if not run.in_use_by]
    kept = sum(run.num_bytes for run in dead if run.is_unsaved or run.doubt)
    return sum(run.num_bytes for run in dead) - kept, kept


def check_shared_memory(
    folder: Path,
    needed_bytes: int | None,
    limit_bytes: int,
    available_bytes: int,
    left_behind_bytes: tuple[int, int],
) -> Finding:
    """Check that tables have room in shared memory, and processes beside them.

    Args:
        folder: where the memory file system is mounted.
        needed_bytes: what the job takes on this node; None: not known.
        limit_bytes: memory that processes and shared memory may take together.
        available_bytes: memory of the machine that nothing uses now.
        left_behind_bytes: see `left_behind`.
    """
    name, (freed_at_start, kept) = "shared memory", left_behind_bytes
    status = os.statvfs(folder)
    size, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
    free += freed_at_start
    _, kind = mount_of(folder)
    # huge pages are set apart, and never counted as available
    available = limit_bytes if kind == "hugetlbfs" else available_bytes + freed_at_start
    needed = needed_bytes or LEAST_MEMORY_BYTES
    room = (1 + HEADROOM) * needed
    text = (
        f"{folder} ({kind}): {size_text(free)} of {size_text(size)} free; memory limit "
        f"{size_text(limit_bytes)}, available {size_text(available)}"
        + f"; dead runs hold {size_text(kept)} more" * bool(kept)
        + f"; compared with {size_text(needed)}, and {HEADROOM:.0%} for processes"
        + ", as --memory does not say what the job takes" * (needed_bytes is None)
    )
    if kind not in MEMORY_FILE_SYSTEMS:
        return problem(name, text, f"name a memory file system (tmpfs) in {ROOT_VARIABLE}")
    if not os.access(folder, os.W_OK):
        return problem(
            name, f"{text}; it cannot be written", "mount it writable for this user (`mount -o rw`)"
        )
    advice = []
    if limit_bytes < needed:
        least = size_text(room)
        advice.append(
            f"raise the memory limit of the job to {least} or more (Slurm: --mem), or take more nodes"
        )
    elif available < needed:
        how = "`ps aux --sort -rss`, `df -t tmpfs`"
        advice.append(f"end what else takes memory on this machine ({how}), or take more nodes")
    if free < needed:
        how = "`mount -o remount,size=...`; Docker: --shm-size; Kubernetes: emptyDir of medium Memory"
        advice.append(f"enlarge {folder} to {size_text(size - free + needed)} or more ({how})")
    finding = problem if advice else warning
    if not advice and min(limit_bytes, available) < room:
        advice.append(f"give it {size_text(room)} or more, or the kernel may end processes that lack memory")
    if kept:
        advice.append("`cpr clean` lists what dead runs hold, and says how to save or remove it")
    return finding(name, text, "; ".join(advice)) if advice else Finding(name, text)


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
