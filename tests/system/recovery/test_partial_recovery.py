"""Workers under torchrun that fail in every way: what each has afterwards is exactly what it should be."""

import json
import math
import re
import uuid

import pytest
import torch

from cpr.checkpoint.storage.base import open_storage
from cpr.estimator.history import read_history
from tests.cpr.shards.models import batch
from tests.system.recovery.recovery_worker import (
    BASE_AT,
    BATCH,
    FAIL_AT,
    MORE,
    NUM_OWED,
    PRIORITY,
    ROWS,
    SAVE_AT,
)
from tests.system.runs import free_port

WORKER = ("-m", "tests.programs", "tests.system.prepared", "tests.system.recovery.recovery_worker")
PATIENCE_S = 150

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(memory))
    return tmp_path


@pytest.fixture
def below_cpr_run(launcher, monkeypatch):
    """What `cpr run` tells torchrun; several share the process that is prepared."""
    monkeypatch.setenv("CPR_LAUNCH", uuid.uuid4().hex)
    monkeypatch.setenv("CPR_LAUNCH_PID", str(launcher))


@pytest.fixture
def torchrun(start, folder):
    """Runs the worker under torchrun to its end; what it said."""

    def work(scenario, ranks=2, restarts=3):
        process = start(
            "-m", "torch.distributed.run", "--nproc-per-node", ranks, "--max-restarts", restarts,
            "--master-port", free_port(), *WORKER, folder, scenario, forks=True,
        )  # fmt: skip
        _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    return work


def load(folder, name):
    return torch.load(folder / f"{name}.pt")


def story_of(folder, generation, rank=0):
    return json.loads((folder / f"begin-{generation}-{rank}.json").read_text())


def assert_rows(mine, theirs, replicated=None):
    """Equal shards, weights and optimizer state, bit for bit."""
    for ours, other in zip(mine["shards"], theirs["shards"], strict=True):
        assert (ours["table"], ours["at"]) == (other["table"], other["at"])
        if replicated is None or ours["replicated"] == replicated:
            assert ours["columns"].keys() == other["columns"].keys()
            for name, column in ours["columns"].items():
                assert torch.equal(column, other["columns"][name]), (ours["table"], ours["at"], name)


def assert_dense(mine, theirs):
    for name, value in mine["dense"].items():
        assert torch.equal(value, theirs["dense"][name]), name


@pytest.mark.parametrize("scenario", ["lose", "lose_again"])
def test_a_lost_worker_has_its_last_saved_rows_and_all_others_live_ones(torchrun, folder, scenario):
    """`lose_again`: the survivor is killed in the middle of the recovery; nothing more is lost by that."""
    code, said = torchrun(scenario)
    assert code == 0, said[-4000:]
    generation = {"lose": 1, "lose_again": 2}[scenario]
    alive, saved = load(folder, "alive-0"), load(folder, "saved-1")
    survivor, replaced = (load(folder, f"begin-{generation}-{rank}") for rank in (0, 1))
    assert_rows(survivor, alive)
    assert_rows(replaced, saved, replicated=False)
    assert_rows(replaced, load(folder, "alive-1"), replicated=True)  # from the survivor
    assert_dense(survivor, alive)
    assert_dense(replaced, alive)
    assert torch.equal(survivor["owed"], alive["owed"])
    assert alive["owed"].any()
    assert not replaced["owed"].any()
    for rank in (0, 1):
        told = (folder / f"losses-{generation}-{rank}.txt").read_text()
        assert f"at step {FAIL_AT}, gradients that rank 1 of 2 had not sent yet" in told
        assert 0.2 < float(re.search(r"([\d.]+)% of the energy", told)[1]) / 100 < 0.8

    story = story_of(folder, generation)
    assert (story["kind"], story["step"], story["save_step"]) == ("partial", FAIL_AT, SAVE_AT)
    samples = (FAIL_AT - SAVE_AT) * BATCH * 2
    assert story["pls_added"] == story["pls_total"] == pytest.approx(samples / (1000 * BATCH * 2))
    rows = {origin["table_fqn"].rpartition(".")[2]: origin for origin in story["sources"]}
    assert (rows["a"]["adopted"], rows["a"]["lost"]) == (0, 40)
    assert (rows["b"]["adopted"], rows["b"]["lost"]) == (33, 33)
    assert (rows["d"]["adopted"], rows["d"]["lost"]) == (25, 25)
    assert (rows["e"]["adopted"], rows["e"]["lost"]) == (60, 0)
    lost = [shard["columns"] for shard in replaced["shards"] if not shard["replicated"]]
    lost_bytes = sum(column.nbytes for columns in lost for column in columns.values())
    assert 0 < story["bytes_read"] < 2 * lost_bytes + 16384  # and nothing else is read
    assert not list((folder / "memory").iterdir())


@pytest.mark.parametrize("scenario", ["lose_mirrored_again", "lose_mirror_behind", "lose_mirror_old"])
def test_a_lost_worker_has_the_rows_of_its_mirror(torchrun, folder, scenario):
    """`again`: a worker dies in the middle of the recovery; `behind`: the mirror is one step older, and the
    survivor goes back to it, with what it has of the next batch; `old`: it cannot."""
    code, said = torchrun(scenario)
    assert code == 0, said[-4000:]
    generation, is_old = 1 + scenario.endswith("again"), scenario.endswith("old")
    survivor, replaced = (load(folder, f"begin-{generation}-{rank}") for rank in (0, 1))
    then = "alive" if is_old else "mirrored"
    alive, mirrored = load(folder, f"{then}-0"), load(folder, "mirrored-1")
    assert_rows(survivor, alive)
    assert_rows(replaced, mirrored, replicated=False)
    assert_rows(replaced, load(folder, f"{then}-1"), replicated=True)
    assert_dense(replaced, alive)
    assert torch.equal(survivor["owed"], alive["owed"])
    assert torch.equal(replaced["owed"], torch.zeros(NUM_OWED) if is_old else mirrored["owed"])
    assert alive["owed"].any()
    story, step = story_of(folder, generation), FAIL_AT - scenario.endswith("behind")
    assert (story["kind"], story["step"], story["save_step"]) == ("mirror", step, None)
    assert story["mirror_step"] == step - is_old
    assert not story["interrupted"]
    assert story["pls_total"] == pytest.approx(is_old * BATCH * 2 / (1000 * BATCH * 2))
    rows = {origin["table_fqn"].rpartition(".")[2]: origin for origin in story["sources"]}
    assert (rows["a"]["adopted"], rows["a"]["mirrored"]) == (0, 40)
    assert (rows["b"]["adopted"], rows["b"]["mirrored"]) == (33, 33)
    assert (rows["d"]["adopted"], rows["d"]["mirrored"]) == (25, 25)
    assert not any(origin["lost"] or origin["moved"] for origin in rows.values())
    assert not list((folder / "memory").iterdir())


def chosen(shard):
    """Rows of a shard that the save of step 10 holds: those looked up most since the base, counted here."""
    table = shard["table"].rpartition(".")[2]
    num_rows, first = shard["columns"]["weights"].shape[0], shard["at"][0]
    if table == "c":
        return list(range(num_rows))
    counts = [0] * num_rows
    for rank in (0, 1):
        for number in range(BASE_AT, SAVE_AT):
            for row in batch(100 * rank + number, BATCH, **ROWS)[f"f_{table}"].values().tolist():
                if first <= row < first + num_rows:
                    counts[row - first] += 1
    used = [row for row, count in enumerate(counts) if count]
    return sorted(used, key=lambda row: (-counts[row], row))[: math.ceil(PRIORITY.ratio * num_rows)]


@pytest.mark.usefixtures("below_cpr_run")
def test_saved_by_priority_each_lost_row_is_as_it_was_last_saved_and_all_others_live_on(torchrun, folder):
    code, said = torchrun("lose_by_priority")
    assert code == 0, said[-4000:]
    survivor, replaced = (load(folder, f"begin-1-{rank}") for rank in (0, 1))
    expected, newest = load(folder, "base-1"), load(folder, "saved-1")
    for mine, latest in zip(expected["shards"], newest["shards"], strict=True):
        rows = chosen(mine)
        assert rows
        for name, column in mine["columns"].items():
            column[rows] = latest["columns"][name][rows]
    assert_rows(replaced, expected, replicated=False)
    assert_rows(survivor, load(folder, "alive-0"))

    story = story_of(folder, 1)
    assert (story["kind"], story["save_step"]) == ("partial", SAVE_AT)
    # it counts as if tables were saved whole: the last time that they were was the base
    samples = (FAIL_AT - BASE_AT) * BATCH * 2
    assert story["pls_total"] == pytest.approx(samples / (1000 * BATCH * 2))
    assert sum(loss["pls"] for loss in story["losses"]) == pytest.approx(story["pls_added"])
    assert {loss["rank"] for loss in story["losses"]} == {1}
    history = read_history(open_storage(str(folder / "checkpoint")))
    # counters of the survivor lived on, those of the other are known: no base comes before the last save
    assert [(save.step, save.kind) for save in history.saves] == [
        (BASE_AT, "base"),
        (SAVE_AT, "rows"),
        (FAIL_AT + MORE, "rows"),
        (FAIL_AT + MORE, "base"),
    ]
    assert [failure.kind for failure in history.failures] == ["partial"]


@pytest.mark.parametrize(
    ("scenario", "kinds"),
    [
        ("lose_before_seal", ["start", "partial", "partial"]),
        ("lose_after_seal", ["start", "partial", "process"]),
    ],
)
@pytest.mark.usefixtures("below_cpr_run")
def test_what_is_lost_is_counted_once_whenever_the_recovery_dies(torchrun, folder, scenario, kinds):
    code, said = torchrun(scenario)
    assert code == 0, said[-4000:]
    recoveries = json.loads((folder / "recoveries-0.json").read_text())
    assert [each["kind"] for each in recoveries] == kinds
    samples = (FAIL_AT - SAVE_AT) * BATCH * 2
    once = pytest.approx(samples / (1000 * BATCH * 2))
    assert [each["pls_added"] for each in recoveries] == [0, once, 0]
    assert recoveries[-1]["pls_total"] == once
    assert_rows(load(folder, "begin-2-1"), load(folder, "saved-1"), replicated=False)


@pytest.mark.usefixtures("below_cpr_run")
@pytest.mark.parametrize(("scenario", "ranks"), [("resize_mirrored", 1), ("resize", 3)])
def test_another_world_size_gets_the_rows_from_memory_and_mirrors(
    torchrun, folder, monkeypatch, scenario, ranks
):
    """`mirrored`: one of two workers is lost with its memory, and the other one continues alone."""
    code, _ = torchrun(scenario, restarts=0)
    assert code != 0
    monkeypatch.setenv("CPR_CONTINUES", "1")
    code, said = torchrun(scenario, ranks=ranks)
    assert code == 0, said[-4000:]
    alive = [load(folder, f"alive-{rank}") for rank in (0, 1)]
    begun = [load(folder, f"begin-1-{rank}") for rank in range(ranks)]
    torch.testing.assert_close(sum(each["owed"] for each in begun), sum(each["owed"] for each in alive))
    assert (folder / "losses-1-0.txt").read_text() == ""
    before, after = whole(alive), whole(begun)
    assert before.keys() == after.keys()
    for key, column in before.items():
        if key[1] == "weights" or not key[0].endswith(".b"):  # b is split by columns: see below
            assert torch.equal(column, after[key]), key
    story = story_of(folder, 1)
    is_mirrored = scenario == "resize_mirrored"
    kind, lost = ("mirror", FAIL_AT) if is_mirrored else ("process", None)
    assert (story["kind"], story["mirror_step"]) == (kind, lost)
    assert (story["step"], story["bytes_read"], story["pls_added"]) == (FAIL_AT, 0, 0)
    assert any(origin["mirrored"] for origin in story["sources"]) == is_mirrored
    assert any("about to change its mind" in ending["why"] for ending in story["dead"])
    assert not list((folder / "memory").iterdir())


def whole(parts):
    """Columns of whole tables by table and name; of row-wise state under a split by columns, the first's."""
    tables = {}
    for shard in (shard for part in parts for shard in part["shards"]):
        for name, column in shard["columns"].items():
            pieces = tables.setdefault((shard["table"], name), {})
            pieces.setdefault(shard["at"] if column.dim() == 2 else shard["at"][0], column)
    return {key: joined(pieces) for key, pieces in tables.items()}


def joined(pieces):
    if not isinstance(next(iter(pieces)), tuple):
        return torch.cat([pieces[at] for at in sorted(pieces)])
    rows = sorted({row for row, _ in pieces})
    return torch.cat([torch.cat([pieces[at] for at in sorted(pieces) if at[0] == row], 1) for row in rows])
