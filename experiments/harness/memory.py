"""Memory of the processes that an experiment measures."""

from pathlib import Path


def peak_bytes() -> int:
    """Most memory that this process has taken so far, its shared memory included.

    What it shares with other processes, as a forked one does with its fork server, counts by its share.
    """
    peak, now = (_kilobytes("status", name) for name in ("VmHWM", "VmRSS"))
    return (peak - now + _kilobytes("smaps_rollup", "Pss")) * 1024


def _kilobytes(file: str, name: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
