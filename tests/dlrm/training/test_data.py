"""Checks before a process group exists."""

import json
import shutil
from pathlib import Path
from typing import get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from data.loader import loader, order
from data.loader.assemble import Assembler
from data.synthetic import SyntheticConfig, generate
from dlrm.config.recipe import load_config
from dlrm.config.schema import DataConfig
from dlrm.launch.device import Ranks, resolve_device
from dlrm.training.data import prepare

ALONE = Ranks(rank=0, local_rank=0, world_size=1)
CPU = torch.device("cpu")


@pytest.fixture
def dataset(small_dataset, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(small_dataset, tmp_path / "dataset"))


def prepare_with(dataset, *overrides, ranks=ALONE):
    config = load_config("tiny", [f"data.uri={dataset}", "data.global_batch_size=32", *overrides])
    inputs = prepare(config, "tiny", ranks)
    inputs.close()
    return inputs


def file_of(dataset, part):
    return dataset / json.loads((dataset / "dataset.json").read_text())["parts"][part]["path"]


def change_part(dataset, change, part=0):
    """Rewrite a file with `change` of its table, and the manifest to fit the new file."""
    manifest = json.loads((dataset / "dataset.json").read_text())
    part = manifest["parts"][part]
    path = dataset / part["path"]
    pq.write_table(change(pq.read_table(path, partitioning=None)), path, row_group_size=128)
    part["num_bytes"] = path.stat().st_size
    (dataset / "dataset.json").write_text(json.dumps(manifest))


def test_days_and_batches(dataset):
    inputs = prepare_with(dataset)
    assert inputs.loader.manifest.days == (0, 1)
    assert inputs.test_loader.manifest.days == (2,)
    assert len(inputs.loader) == 2 * 256 // 32
    assert len(prepare_with(dataset, "data.train_days=[1]", "data.test_days=[0]").loader) == 256 // 32
    assert set(get_args(get_type_hints(DataConfig)["order"])) == set(order.ORDERS)
    inputs = prepare_with(dataset, "data.order=seldp")
    assert (inputs.loader.config.order, inputs.test_loader.config.order) == ("seldp", "stripes")


@pytest.mark.parametrize("multi_hot", [False, True])
def test_ids_of_a_sample_are_counted(multi_hot, tmp_path):
    shape = SyntheticConfig(
        scale=1e-4, days=2, rows_per_day=256, rows_per_block=256, rows_per_file=256, multi_hot=multi_hot
    )
    generate(shape, tmp_path / "dataset")
    ids = prepare_with(tmp_path / "dataset").ids
    part = pq.read_table(next((tmp_path / "dataset").glob("day=0/*.parquet")), partitioning=None)
    assert len(ids) == 26
    for name, of_sample in ids.items():
        column = part.column(name).combine_chunks()
        assert of_sample == pytest.approx(len(column.flatten()) / 256 if multi_hot else 1)
    assert (max(ids.values()) > 1) == multi_hot


def test_ranks_share_the_global_batch(dataset):
    inputs = prepare_with(dataset, ranks=Ranks(rank=1, local_rank=1, world_size=4))
    assert inputs.loader.config.batch_size == 8
    assert len(inputs.loader) == 2 * 256 // 32
    with pytest.raises(ValueError, match="global_batch_size 32 cannot be divided among 3 ranks"):
        prepare_with(dataset, ranks=Ranks(rank=0, local_rank=0, world_size=3))
    with pytest.raises(ValueError, match="halves the batch of each rank, which has one sample"):
        prepare_with(dataset, "train.pipeline=waves", ranks=Ranks(rank=0, local_rank=0, world_size=32))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.uri=nowhere"], r"nowhere holds no dataset\.json.*python -m data\.prepare"),
        (["data.train_days=[7]"], r"the data set has no day \[7\]; it has days \[0, 1, 2\]"),
        (["data.test_days=[7]"], r"the data set has no day \[7\]"),
        (["data.test_days=[0,1,2]"], "set data.train_days and data.test_days"),
        (["data.global_batch_size=100000"], "fewer than one step"),
        (["tables.max_rows=100"], r"rows, more than tables\.max_rows 100; make the data .* --cap 100"),
        (["train.device=cpu", "sharding.kinds=['table_row_wise']"], "no table_row_wise sharding on cpu"),
    ],
)
def test_mistakes_are_found_before_a_process_group_exists(dataset, overrides, message):
    with pytest.raises(ValueError, match=message):
        prepare_with(dataset, *overrides)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.update(features=[]), "dense columns but no features with ids"),
        (
            lambda manifest: manifest["features"][3].update(name="é" * 80),
            "é... is too long for the name of a",
        ),
        (
            lambda manifest: manifest["features"][3].update(rows=0),
            r"cat_3 has raw ids.*all features: \['\*'\]",
        ),
    ],
)
def test_features_that_cannot_have_tables_are_refused(dataset, change, message):
    manifest = json.loads((dataset / "dataset.json").read_text())
    change(manifest)
    (dataset / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        prepare_with(dataset)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused(dataset):
    with pytest.raises(ValueError, match=r"no GPU here; set train\.device=cpu"):
        prepare_with(dataset, "train.device=cuda")
    assert resolve_device("auto", ALONE) == CPU


def test_the_gpu_is_chosen_before_anything_is_pinned(dataset, monkeypatch):
    calls = []
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", device)))

    class Recorded(Assembler):
        def __init__(self, keys, batch_size, pin_memory):
            calls.append(("pin_memory", pin_memory))
            super().__init__(keys, batch_size, pin_memory=False)

    monkeypatch.setattr(loader, "Assembler", Recorded)
    monkeypatch.setattr(loader, "CopyAhead", lambda device: calls.append(("copies", device)))
    prepare_with(dataset, "train.device=cuda")
    gpu = torch.device("cuda", 0)
    assert calls == [("set_device", gpu), *[("pin_memory", True), ("copies", gpu)] * 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop(["cat_3"]), r"lacks the columns \['cat_3'\]"),
        (
            lambda table: table.set_column(
                table.schema.get_field_index("int_0"),
                "int_0",
                pa.array(["text"] * table.num_rows),
            ),
            "column int_0 should be float32 or another number, but is string",
        ),
        (
            lambda table: table.set_column(
                table.schema.get_field_index("cat_8"),
                "cat_8",
                pa.array([10**6] * table.num_rows, pa.int32()),
            ),
            "column cat_8 holds id 1000000, but its table has 3 rows",
        ),
    ],
    ids=["missing_column", "wrong_type", "id_outside_its_table"],
)
@pytest.mark.parametrize("part", [0, 2], ids=["of_training", "of_evaluation"])
def test_data_that_does_not_fit_its_manifest_is_refused(dataset, change, message, part):
    change_part(dataset, change, part)
    with pytest.raises(ValueError, match=message):
        prepare_with(dataset)


@pytest.mark.parametrize("part", [1, 2])
def test_missing_and_truncated_files_are_found_before_training(dataset, part):
    path = file_of(dataset, part)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=rf"{path.name} has \d+ bytes instead of \d+: copy it again"):
        prepare_with(dataset)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{path.name} is in the data set's manifest but not in"):
        prepare_with(dataset)
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError, match=f"{path.name} is in the data set's manifest but not in"):
        prepare_with(dataset)


def test_days_that_are_trained_and_tested_are_warned_of(dataset, caplog):
    last = prepare_with(dataset).manifest.days[-1]
    assert "trained and tested" not in caplog.text
    prepare_with(dataset, f"data.train_days=[{last}]")  # test_days: the last day
    assert f"days [{last}] are trained and tested" in caplog.text


def test_unused_days_are_not_checked(dataset):
    change_part(dataset, lambda table: table.drop(["cat_3"]))
    prepare_with(dataset, "data.train_days=[1]")
    file_of(dataset, 0).unlink()
    prepare_with(dataset, "data.train_days=[1]")


def test_the_environment_of_torchrun(monkeypatch):
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(rank=5, local_rank=1, world_size=8)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert Ranks.from_environment() == ALONE


def test_the_configured_cache_is_used(dataset, tmp_path):
    folder = tmp_path / "cache"
    config = [f"data.cache_folder={folder}", "data.cache_disk_gb=0.1", "data.cache_memory_gb=0.1"]
    assert prepare_with(dataset, *config).source is not None
    assert any(path.is_file() for path in Path(folder).rglob("*"))


def test_unreadable_data_is_reported_with_its_key(tmp_path):
    for uri, kind in ((tmp_path, ValueError), ("floppy://a", ValueError), ("a" * 300, OSError)):
        with pytest.raises(kind, match=r"^data\.uri: .*(holds no|cannot be (opened|read))"):
            prepare_with(uri)
