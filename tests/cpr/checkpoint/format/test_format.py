"""FORMAT.md is current: its example runs, and its tables name every field."""

import re
from pathlib import Path

import pytest
import torch

from cpr.checkpoint.format import manifest
from cpr.checkpoint.format.codecs import CODECS
from cpr.checkpoint.storage.local import LocalStorage
from tests.cpr.checkpoint.saves import make_shard, manifest_path, randomise, save

PAGE = (Path(manifest.__file__).parent / "FORMAT.md").read_text()


@pytest.mark.parametrize("codec", ["exact", "fp32", "fp16"])
def test_the_example_in_format_md_reads_a_sharded_table(tmp_path, codec):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(example, names)
    generator = torch.Generator().manual_seed(3)
    pieces = [
        make_shard(shape=(60, 8), cols=(0, 3)),
        make_shard(shape=(60, 8), cols=(3, 8), rows=(0, 40)),
        make_shard(shape=(60, 8), cols=(3, 8), rows=(40, 60)),
        make_shard("model.other", shape=(20, 4)),
    ]
    storage, newest, live = LocalStorage(tmp_path), None, {}
    for sequence, chosen in [(3, range(60)), (5, [0, 9, 41]), (6, [41, 59]), (7, [])]:
        ids = {}
        for shard in pieces:
            end = shard.row_offset + shard.num_rows
            ids[shard.name] = torch.tensor(
                [row for row in chosen if shard.row_offset <= row < end], dtype=int
            )
            change(shard, ids[shard.name], generator)
        newest = save(storage, sequence, pieces, parent=newest, ids=ids, codec=codec)
        left, *right = (piece.weights for piece in pieces[:3])
        live[sequence] = torch.cat([left, torch.cat(right)], dim=1).tolist()
    for sequence, table in live.items():
        assert names["read_table"](tmp_path, sequence, "model.t") == table


def change(shard, ids, generator):
    other = make_shard(shape=(shard.num_rows, shard.num_cols))
    randomise(other, generator)
    for name, column in shard.columns.items():
        column[ids - shard.row_offset] = other.columns[name][ids - shard.row_offset]


def test_every_codec_is_described():
    assert set(CODECS) <= set(re.findall(r"`(\w+)`", PAGE.split("| codec |")[1]))


def test_every_field_of_a_manifest_is_described(tmp_path):
    storage = LocalStorage(tmp_path)
    base = save(storage, 0, [make_shard()])
    save(storage, 1, [make_shard()], base, {"model.t/r0-c0": torch.arange(3)}, state={"x": 1})
    text = (tmp_path / manifest_path(1)).read_text()
    names = set(re.findall(r'"(\w+)":', text)) - {"sum"}  # the optimizer's name for its state
    assert names <= set(re.findall(r"`(\w+)`", PAGE))
