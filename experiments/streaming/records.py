"""Records with numbers of their own, and how often each was trained in a run whose workers were killed."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.dataset import MANIFEST_NAME, Feature, read_manifest
from experiments.streaming.model import RECORD

NUM_FEATURES: Final = 2
"""Features that are kept beside the number of the record."""


def number_records(dataset: Path, folder: Path) -> None:
    """Copy a data set with a feature more, whose id is the number of the record, and with few others."""
    manifest = read_manifest(str(dataset))
    parts, begin = [], 0
    for part in manifest.parts:
        numbers = np.arange(begin, begin + part.num_rows, dtype=np.int32)
        table = pq.read_table(dataset / part.path).append_column(RECORD, pa.array(numbers))
        path = folder / part.path
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path, row_group_size=max(part.row_groups))
        content = path.read_bytes()
        parts.append(replace(part, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
        begin += part.num_rows
    features = (*manifest.features[:NUM_FEATURES], Feature(name=RECORD, rows=begin))
    numbered = replace(manifest, features=features, parts=tuple(parts))
    (folder / MANIFEST_NAME).write_text(numbered.to_json())


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a process has trained."""

    generation: int
    """Number of restarts before it."""
    batches: Sequence[Sequence[int]]
    """Records of each forward pass, in order."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What has become of the records of a run."""

    lost: int
    """Records that no process has trained."""
    repeated: int
    """Records that were trained in more than one step."""
    interrupted: int
    """Records of steps in which a worker died; they are trained in a later step and count there."""


def read_trained(folder: Path) -> list[Trained]:
    """Read what the processes of a run have written, see `experiments.streaming.model`."""
    return [
        Trained(
            generation=int(path.name.partition("-")[0]),
            batches=[[int(each) for each in line.split()] for line in path.read_text().splitlines()],
        )
        for path in sorted(folder.iterdir())
    ]


def account(trained: Sequence[Trained], starts: Mapping[int, int], num_records: int) -> Account:
    """Count the records that were lost, and those that were trained more than once.

    The last forward pass of a process that was ended does not count if the generation after it began before
    the end of that step. All other passes count.

    Args:
        trained: by all processes.
        starts: steps done at the start of a generation, for each that followed a killed one.
        num_records: that have arrived, numbered from 0.
    """
    counts, interrupted = Counter[int](), 0
    begins = {0: 0, **starts}
    for each in trained:
        num_steps = begins[each.generation] + len(each.batches)
        later = [step for generation, step in begins.items() if generation > each.generation]
        is_interrupted = bool(each.batches and later) and num_steps > min(later)
        interrupted += len(each.batches[-1]) if is_interrupted else 0
        for batch in each.batches[: -1 if is_interrupted else None]:
            counts.update(batch)
    return Account(
        lost=sum(not counts[record] for record in range(num_records)),
        repeated=sum(count > 1 for count in counts.values()),
        interrupted=interrupted,
    )
