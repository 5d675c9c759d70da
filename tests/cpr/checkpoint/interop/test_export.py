"""Exports are full models that other libraries read, and an incomplete export never looks finished."""

import json
import resource
import signal

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.format.manifest import save_folder
from cpr.checkpoint.interop import full_model as whole
from cpr.checkpoint.interop import to_safetensors as export_safetensors
from cpr.checkpoint.interop.export import WRITERS, export
from cpr.errors import CheckpointError, CorruptFileError, NoUsableStateError
from tests.cpr.checkpoint.saves import MemoryStorage, make_shard, randomise, save

# Outside of a process group, as here, torch tells so at every call.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {
    "steps_done": 20,
    "dense": {"over.0.weight": torch.arange(6.0).reshape(2, 3), "over.0.steps": torch.tensor(7)},
    "registered": {
        "optimizer": {
            "state": {0: {"sum": torch.ones(2, 3), "step": torch.tensor(3.0)}},
            "groups": [{"lr": 0.1}],
        },
        "schedule": {"betas": (0.9, 0.99), "raw": b"\x00\xff", "none": None, "inf": float("inf")},
        "tracker": {"counts": np.arange(5, dtype=np.uint32), "big": np.arange(3, dtype=">i4")},
    },
}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    """So that tables pass by in many windows."""
    monkeypatch.setattr(whole, "WINDOW_BYTES", 1000)


@pytest.fixture
def saved():
    """The storage with a base and a row save of three tables in pieces, and the shards as they were saved."""
    storage, generator = MemoryStorage(), torch.Generator().manual_seed(3)
    shards = [
        make_shard("model.a", rows=(0, 60)),
        make_shard("model.a", rows=(60, 100)),
        make_shard("model.half", shape=(50, 8), dtype=torch.float16, states={}),
        make_shard(
            "model.brain", shape=(50, 4), dtype=torch.bfloat16, states={"exp_avg": False, "sum": True}
        ),
    ]
    for shard in shards:
        randomise(shard, generator)
    base = save(storage, 0, shards, state={"steps_done": 0, "dense": {}, "registered": {}})
    ids = {shard.name: torch.arange(shard.row_offset + 1, shard.row_offset + 30, 3) for shard in shards}
    for shard in shards:
        old = {name: column.clone() for name, column in shard.columns.items()}
        randomise(shard, generator)
        chosen = torch.zeros(shard.num_rows, dtype=torch.bool)
        chosen[ids[shard.name] - shard.row_offset] = True
        for name, column in shard.columns.items():
            column[~chosen] = old[name][~chosen]
    save(storage, 1, shards, base, ids, state=STATE, step=20)
    return storage, shards


def expected(shards):
    """All columns of tables, by the names that exports give them."""
    tensors = {}
    for fqn in {shard.table_fqn for shard in shards}:
        parts = [shard for shard in shards if shard.table_fqn == fqn]
        for name in parts[0].columns:
            key = f"optimizer.state.{fqn}.weight.{name}" if name != "weights" else f"model.{fqn}.weight"
            tensors[key] = torch.cat([part.columns[name] for part in parts])
    return tensors


def other_tensors():
    return {
        "model.over.0.weight": STATE["dense"]["over.0.weight"],
        "model.over.0.steps": STATE["dense"]["over.0.steps"],
        "registered.optimizer.state.0.sum": torch.ones(2, 3),
        "registered.optimizer.state.0.step": torch.tensor(3.0),
        "registered.tracker.counts": torch.arange(5).to(torch.uint32),
    }


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == tensor.tolist(), name


def test_dcp_loads_an_export_into_plain_tensors(saved, tmp_path):
    storage, shards = saved
    export(storage, "dcp", tmp_path / "out")
    wanted = {**expected(shards), **other_tensors()}
    metadata = FileSystemReader(tmp_path / "out").read_metadata()
    assert metadata.state_dict_metadata.keys() == wanted.keys()
    found = {name: torch.empty_like(tensor) for name, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert_equal(found, wanted)
    nested = {"model": {"model.half.weight": torch.empty(50, 8, dtype=torch.float16)}}
    dcp.load(nested, checkpoint_id=tmp_path / "out", no_dist=True)  # as with `model.state_dict()`
    assert torch.equal(nested["model"]["model.half.weight"], shards[2].weights)


def test_safetensors_reads_every_file_and_the_index_names_them(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(export_safetensors, "FILE_BYTES", 2000)
    storage, shards = saved
    export(storage, "safetensors", tmp_path / "out")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert set(index["weight_map"].values()) == set(files)
    found = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    wanted = {**expected(shards), **other_tensors()}
    assert_equal(found, wanted)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118  # not a dict


def test_parquet_holds_a_folder_a_table(saved, tmp_path):
    storage, shards = saved
    export(storage, "parquet", tmp_path / "out")
    for fqn in ("model.a", "model.half", "model.brain"):
        table = pq.read_table(tmp_path / "out" / fqn)
        wanted = expected(shards)
        weights = wanted[f"model.{fqn}.weight"]
        assert table["row"].to_pylist() == list(range(len(weights)))
        assert table["weights"].to_pylist() == weights.float().tolist()
        states = {name.rpartition(".")[2]: each for name, each in wanted.items() if f".{fqn}.weight." in name}
        assert set(table.column_names) == {"row", "weights", *states}
        for name, values in states.items():
            assert table[name].to_pylist() == values.tolist()


def test_parquet_keeps_integers_exactly(tmp_path):
    """As the id that has a row of a dynamic table: as a float it would be another id."""
    storage, shard = MemoryStorage(), make_shard("model.dynamic", shape=(3, 4), states={})
    shard.weights.zero_()
    ids, seen = torch.tensor([2**53 + 1, -(2**63), 7]), torch.tensor([2**24 + 1, 0, -1], dtype=torch.int32)
    shard.optimizer_state.update(id=ids, last_seen=seen)
    save(storage, 0, [shard], state={"steps_done": 0, "dense": {}, "registered": {}})
    export(storage, "parquet", tmp_path / "out")
    table = pq.read_table(tmp_path / "out/model.dynamic")
    assert table["id"].to_pylist() == ids.tolist()
    assert table["last_seen"].to_pylist() == seen.tolist()
    assert [str(table.schema.field(name).type) for name in ("id", "last_seen")] == ["int64", "int32"]


def test_an_older_state_can_be_asked_for(saved, tmp_path):
    storage, _ = saved
    done = export(storage, "safetensors", tmp_path / "out", sequence=0)
    assert done.state.sequence == 0
    notes = json.loads((tmp_path / "out/cpr-export.json").read_text())
    assert (notes["sequence"], notes["step"]) == (0, 0)
    with pytest.raises(ValueError, match="has no save 9"):
        export(storage, "dcp", tmp_path / "other", sequence=9)
    assert export(storage, "parquet", tmp_path / "by step", step=20).state.sequence == 1
    with pytest.raises(ValueError, match="no state of step 9; steps that can be loaded: 0, 20"):
        export(storage, "dcp", tmp_path / "other", step=9)


def damage(storage, sequence):
    manifest = next(state.newest for state in find_states(storage)[0] if state.sequence == sequence)
    entry = manifest.rows[-1]
    path = f"{save_folder(sequence)}/{entry.path}"
    storage.flip_bit(path, entry.chunks[-1].offset + entry.chunks[-1].length - 1)
    return path


@pytest.mark.parametrize("to", WRITERS)
def test_a_damaged_state_leads_to_the_older_one_and_is_named(saved, tmp_path, to):
    storage, _ = saved
    path = damage(storage, 1)
    done = export(storage, to, tmp_path / "out")
    assert done.state.sequence == 0
    assert path in done.rejected[0].reason
    with pytest.raises(CorruptFileError, match=path):
        export(storage, to, tmp_path / "asked", sequence=1)
    damage(storage, 0)
    with pytest.raises(NoUsableStateError, match="save 1"):
        export(storage, to, tmp_path / "nothing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("to", WRITERS)
def test_an_error_in_the_middle_leaves_nothing(saved, tmp_path, to):
    """Nor does what a killed export leaves look finished."""
    storage, _ = saved
    bytes_written = []

    def fail_half_way(num_bytes):
        bytes_written.append(num_bytes)
        assert [path.name for path in tmp_path.iterdir()] == ["out.unfinished"]
        if sum(bytes_written) > 2000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(storage, to, tmp_path / "out", progress=fail_half_way)
    assert bytes_written
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def short_files():
    """No file of this process may grow beyond 3000 bytes, as on a disk that is full."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("to", WRITERS)
def test_a_full_disk_is_named_with_what_to_do(saved, tmp_path, to, short_files):
    storage, _ = saved
    with pytest.raises(CheckpointError, match=r"writing .*out failed: File too large\. What to do: "):
        export(storage, to, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_other_state_is_readable_as_json(saved, tmp_path):
    storage, _ = saved
    export(storage, "dcp", tmp_path / "out")
    common = json.loads((tmp_path / "out/cpr-export.json").read_text())["state"]["common"]
    assert common["steps_done"] == 20
    assert common["dense"]["over.0.steps"] == {"$tensor": "model.over.0.steps"}
    optimizer = common["registered"]["optimizer"]
    assert optimizer["groups"] == [{"lr": 0.1}]
    assert optimizer["state"]["$items"][0][0] == 0
    schedule, tracker = common["registered"]["schedule"], common["registered"]["tracker"]
    assert schedule["betas"] == {"$tuple": [0.9, 0.99]}
    assert (schedule["raw"], schedule["inf"]) == ({"$bytes": "AP8="}, {"$float": "inf"})
    assert tracker["counts"] == {"$array": "registered.tracker.counts"}
    assert tracker["big"]["$raw_array"][:2] == [">i4", [3]]


def test_a_folder_in_use_is_refused(saved, tmp_path):
    storage, _ = saved
    (tmp_path / "empty").mkdir()
    export(storage, "parquet", tmp_path / "empty")
    with pytest.raises(ValueError, match="in use"):
        export(storage, "parquet", tmp_path / "empty")
    (tmp_path / "new.unfinished").mkdir()
    with pytest.raises(ValueError, match="interrupted"):
        export(storage, "parquet", tmp_path / "new")


@pytest.mark.parametrize("to", WRITERS)
def test_tables_pass_by_in_windows(saved, tmp_path, to, monkeypatch):
    """Never more rows in memory than a window has, and the bar ends where it should."""
    storage, shards = saved
    reads, totals, seen = [], [], []
    original = whole.load_shards

    def watched(storage, state, targets):
        reads.append(sum(target.num_rows * target.bytes_per_row for target in targets))
        return original(storage, state, targets)

    monkeypatch.setattr(whole, "load_shards", watched)
    export(storage, to, tmp_path / "out", progress=seen.append, start=totals.append)
    num_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in shards)
    assert max(reads) <= 1000
    assert sum(reads) == sum(seen) == num_bytes
    assert totals == [num_bytes]
