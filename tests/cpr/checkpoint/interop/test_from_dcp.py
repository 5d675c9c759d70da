"""From `torch.distributed.checkpoint` into a checkpoint directory, and back again bit for bit."""

import json
import pickle
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.format.manifest import save_folder
from cpr.checkpoint.interop import full_model as whole
from cpr.checkpoint.interop.dcp_source import open_source
from cpr.checkpoint.interop.export import export
from cpr.checkpoint.interop.from_dcp import import_dcp
from cpr.checkpoint.load.loader import load_shards, read_state_file
from cpr.checkpoint.save import whole_base
from cpr.checkpoint.save.rank_writer import PartWriter
from cpr.errors import CheckpointError, CorruptFileError
from tests.cpr.checkpoint.saves import MemoryStorage, commit, make_shard, save

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
        "schedule": {
            "betas": (0.9, 0.99),
            "raw": b"\x00\xff",
            "none": None,
            "inf": float("inf"),
            "$x": [True],
        },
        "tracker": {"counts": np.arange(5, dtype=np.uint32), "big": np.arange(3, dtype=">i4")},
        "odd": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    },
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(whole, "WINDOW_BYTES", 1000)
    monkeypatch.setattr(whole_base, "CHUNK_BYTES", 300)


def saved_in(storage):
    return {path: data for path, data in storage.files.items() if path.startswith("saves/")}


def assert_same_tree(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same_tree(found[key], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same_tree(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


LAYOUTS = {
    "whole": [((0, 100), (0, 8))],
    "rows": [((0, 60), (0, 8)), ((60, 100), (0, 8))],
    "columns": [((0, 100), (0, 2)), ((0, 100), (2, 8))],
    "grid": [((0, 30), (0, 4)), ((30, 100), (0, 4)), ((0, 30), (4, 8)), ((30, 100), (4, 8))],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_import_and_load_give_equal_bits(layout, tmp_path):
    """Also of optimizer state per row of tables that are split by columns, which each part has of its own."""
    generator, storage = torch.Generator().manual_seed(5), MemoryStorage()
    options = {"states": {"sum": True, "exp_avg": False}}
    boxes = LAYOUTS[layout]

    def shards(value):
        counters = {"iter": torch.tensor(value, dtype=torch.int64), "learning_rate": torch.tensor(value / 4)}
        made = [make_shard(rows=rows, cols=cols, counters=counters, **options) for rows, cols in boxes]
        other = make_shard("model.brain", shape=(50, 4), dtype=torch.bfloat16, states={}, counters=counters)
        return [*made, other]

    originals = shards(21)
    for shard in originals:
        for column in shard.columns.values():
            column.copy_(torch.randn(column.shape, generator=generator))
    save(storage, 0, originals, state=STATE, step=20)
    export(storage, "dcp", tmp_path / "dcp")

    imported = MemoryStorage()
    manifest = import_dcp(open_source(tmp_path / "dcp", None, None), imported)
    assert (manifest.kind, manifest.moment, manifest.step) == ("base", "consistent", 20)
    assert verify(imported).is_fine
    (state,), _ = find_states(imported)
    found = shards(0)
    load_shards(imported, state, found)
    for one, other in zip(found, originals, strict=True):
        for name, column in other.columns.items():
            assert torch.equal(one.columns[name], column), (one.name, name)
        assert {name: c.item() for name, c in one.counters.items()} == {"iter": 21, "learning_rate": 5.25}
    assert_same_tree(read_state_file(imported, state, None), STATE)


def test_state_of_single_ranks_comes_back(tmp_path):
    storage = MemoryStorage()
    base = save(storage, 0, [make_shard()], state=STATE, step=20, world_size=2)
    writer = PartWriter(storage, save_folder(1), "exact", with_ids=True)
    writer.write_state(STATE, None)
    for rank in range(2):
        writer.write_state(
            {"random_generators": {"cpu": torch.arange(rank, rank + 4, dtype=torch.uint8)}}, rank
        )
    part = writer.finish({})
    commit(storage, 1, base, rows=part.rows, states=part.states, world_size=2, step=20)
    export(storage, "dcp", tmp_path / "dcp")
    imported = MemoryStorage()
    assert import_dcp(open_source(tmp_path / "dcp", None, None), imported).world_size == 2
    (state,), _ = find_states(imported)
    own = read_state_file(imported, state, 1)
    assert own["random_generators"]["cpu"].tolist() == [1, 2, 3, 4]


def foreign(**more):
    """What a TorchRec user saves: model and fused optimizer, as plain tensors."""
    weights = torch.arange(80.0).reshape(10, 8)
    return {
        "model": {
            "ebc.embedding_bags.t0.weight": weights,
            "ebc.embedding_bags.t1.weight": weights[:5] + 100,
            "over.weight": torch.ones(2, 3),
            "over.bias": torch.zeros(2),
        },
        "optimizer": {
            "state": {
                "ebc.embedding_bags.t0.weight": {"t0.momentum1": torch.arange(10.0)},
                "ebc.embedding_bags.t1.weight": {
                    "t1.momentum1": weights[:5] + 1,
                    "t1.exp_avg_sq": weights[:5] + 2,
                    "t1.iter": torch.tensor([33]),
                    "t1.strange": torch.zeros(3, 3),
                },
            },
            "param_groups": [{"lr": 0.5}, {"lr": 0.25}],
        },
        "epoch": 3,
        **more,
    }


def save_dcp(tree, folder):
    dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_torchrec_directory_becomes_a_base(tmp_path):
    folder = save_dcp(foreign(), tmp_path / "dcp")
    storage = MemoryStorage()
    source = open_source(folder, None, 500)
    manifest = import_dcp(source, storage)
    assert manifest.step == 500
    assert source.left_out == ["optimizer.state.ebc.embedding_bags.t1.weight.t1.strange"]
    (state,), _ = find_states(storage)
    tree = foreign()
    rates = {"learning_rate": torch.tensor(0.5)}
    t0 = make_shard(
        "ebc.embedding_bags.t0",
        shape=(10, 8),
        counters={"iter": torch.tensor(7), **rates},
        states={"sum": True},
    )
    t1 = make_shard(
        "ebc.embedding_bags.t1",
        shape=(5, 8),
        counters={"iter": torch.tensor(7), **rates},
        states={"exp_avg": False, "exp_avg_sq": False},
    )
    load_shards(storage, state, [t0, t1])
    saved = tree["optimizer"]["state"]
    assert torch.equal(t0.weights, tree["model"]["ebc.embedding_bags.t0.weight"])
    assert torch.equal(t0.optimizer_state["sum"], torch.arange(10.0))
    assert torch.equal(t1.optimizer_state["exp_avg"], saved["ebc.embedding_bags.t1.weight"]["t1.momentum1"])
    assert torch.equal(
        t1.optimizer_state["exp_avg_sq"], saved["ebc.embedding_bags.t1.weight"]["t1.exp_avg_sq"]
    )
    # What TorchRec does not save stays as it is in the model.
    assert (t0.counters["iter"], t1.counters["iter"], t1.counters["learning_rate"]) == (7, 33, 0.5)
    rest = read_state_file(storage, state, None)
    assert rest["steps_done"] == 500
    assert_same_tree(rest["dense"], {"over.bias": torch.zeros(2), "over.weight": torch.ones(2, 3)})
    assert rest["registered"]["epoch"] == 3
    assert rest["registered"]["optimizer"] == {"param_groups": [{"lr": 0.5}, {"lr": 0.25}]}


def test_what_only_its_own_program_can_read_is_left_out(tmp_path):
    tree = foreign(started=timedelta(hours=3))
    tree["model"]["version"] = "three"
    source = open_source(save_dcp(tree, tmp_path / "dcp"), None, None)
    assert {"started", "model.version"} <= set(source.left_out)
    assert "started" not in source.trees[None]["registered"]


def test_a_flat_state_dict_of_a_model_alone(tmp_path):
    folder = save_dcp(foreign()["model"], tmp_path / "dcp")
    source = open_source(folder, None, None)
    assert [table.fqn for table in source.tables] == ["ebc.embedding_bags.t0", "ebc.embedding_bags.t1"]
    assert source.trees[None]["dense"].keys() == {"over.weight", "over.bias"}
    assert source.step == 0


def test_tables_may_have_other_names(tmp_path):
    tree = {"model": {"users.w": torch.ones(4, 2), "head": torch.ones(2, 2), "users.scale": torch.ones(2)}}
    folder = save_dcp(tree, tmp_path / "dcp")
    with pytest.raises(ValueError, match="--tables"):
        open_source(folder, None, None)
    source = open_source(folder, ["model.users.w"], None)
    assert [table.fqn for table in source.tables] == ["users.w"]
    assert source.trees[None]["dense"].keys() == {"head", "users.scale"}


def test_two_models_must_be_told_apart(tmp_path):
    model = foreign()["model"]
    folder = save_dcp({"model": model, "teacher": model}, tmp_path / "dcp")
    with pytest.raises(ValueError, match="namesake"):
        open_source(folder, None, None)
    source = open_source(folder, ["model.*.weight"], None)
    assert len(source.tables) == 3  # the pattern is that wide


def test_what_is_no_dcp_directory_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="metadata is not there"):
        open_source(tmp_path, None, None)
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CorruptFileError, match="damaged"):
        open_source(tmp_path, None, None)


def test_a_damaged_directory_leaves_nothing(tmp_path):
    folder = save_dcp(foreign(), tmp_path / "dcp")
    source = open_source(folder, None, None)
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    storage = MemoryStorage()
    with pytest.raises(CorruptFileError, match="embedding_bags"):
        import_dcp(source, storage)
    assert saved_in(storage) == {}


def test_a_directory_that_lacks_rows_of_a_table_becomes_no_base(tmp_path):
    """As where the workers of one node did not write theirs: nothing could load such a base."""
    name, storage = "model.embedding_bags.t.weight", MemoryStorage()
    folder = save_dcp({name: torch.ones(12, 4)}, tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata[name].chunks[0].sizes = torch.Size([8, 4])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptFileError, match="has 48 weights, and the pieces of it that are there have 32"):
        import_dcp(open_source(folder, None, None), storage)
    assert saved_in(storage) == {}


def test_a_directory_with_saves_is_refused(tmp_path):
    folder = save_dcp(foreign(), tmp_path / "dcp")
    storage = MemoryStorage()
    source = open_source(folder, None, None)
    import_dcp(source, storage)
    files = saved_in(storage)
    with pytest.raises(ValueError, match="empty directory"):
        import_dcp(source, storage)
    assert saved_in(storage) == files


def test_what_a_killed_import_has_left_is_cleared_away(tmp_path):
    storage = MemoryStorage()
    left = f"{save_folder(0)}/ebc.embedding_bags.t9/r0-c0.arrow"
    storage.files[left] = b"half"
    import_dcp(open_source(save_dcp(foreign(), tmp_path / "dcp"), None, None), storage)
    assert left not in storage.files
    assert verify(storage).is_fine


def test_a_damaged_export_is_said(tmp_path):
    storage = MemoryStorage()
    save(storage, 0, [make_shard()], state=STATE, step=20)
    export(storage, "dcp", tmp_path / "dcp")
    path = tmp_path / "dcp/cpr-export.json"
    notes = json.loads(path.read_text())
    del notes["tables"]
    path.write_text(json.dumps(notes))
    with pytest.raises(CorruptFileError, match=r"cpr-export\.json"):
        open_source(tmp_path / "dcp", None, None)
