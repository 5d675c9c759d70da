"""Raw lines for the tests of `data.prepare`."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest


def make_lines(num_lines: int, seed: int = 0) -> list[bytes]:
    """Good raw lines, with missing fields, negative integers and repeated categories."""
    rng = random.Random(seed)
    lines = []
    for _ in range(num_lines):
        label = rng.choice([b"0", b"1"])
        dense = [b"" if rng.random() < 0.2 else b"%d" % rng.randint(-3, 10_000) for _ in range(13)]
        ids = [b"" if rng.random() < 0.1 else b"%08x" % (rng.randint(0, 60) * 71_234_567) for _ in range(26)]
        lines.append(b"\t".join([label, *dense, *ids]))
    return lines


@pytest.fixture
def raw_file(tmp_path: Path) -> Callable[..., Path]:
    """Write lines to a raw file."""

    def write(lines: list[bytes], name: str = "train.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write
