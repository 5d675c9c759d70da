"""A checkpoint loads into a model with larger, new or fewer tables: if that is allowed, and only then."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr import Changes
from cpr.checkpoint.interop.export import export
from cpr.checkpoint.state.changes import Difference
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import MismatchError
from tests.cpr.checkpoint.runs import assert_same, flip_bit

SMALL = {"a": 30, "b": 17, "c": 12, "d": 9, "gone": 6}
LARGE = {"a": 41, "b": 64, "c": 13, "d": 9, "new": 8}
WORDS = ("grow:a", "grow:b", "grow:c", "add:new", "remove:gone")
KINDS = ("tw", "cw", "rw", "dp", "unfused")
OPTIMIZERS = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "RowWiseAdagrad": lambda parameters: RowWiseAdagrad(parameters, lr=0.1),
}


def layout_of(kinds, rows):
    return {table: kinds[at % len(kinds)] for at, table in enumerate(rows)}


def make_run(start, kinds, rows, optimizer="Adam", **options):
    """A run whose tables with an ordinary optimizer share one with the dense part, where there are any."""

    def make(model):
        dense = list(model.module.dense.parameters())
        others = [p for p in model.parameters() if p.numel() and not hasattr(p, "_in_backward_optimizers")]
        if optimizer != "Adam":  # which only tables can have
            others = [p for p in others if not any(p is each for each in dense)]
        return OPTIMIZERS[optimizer](others or dense[:1])

    run = start(layout=layout_of(kinds, rows), rows=rows, make_optimizer=make, **options)
    run.checkpointer._loader._optimizers = [run.optimizer]
    return run


@pytest.fixture
def make(start):
    return lambda *arguments, **options: make_run(start, *arguments, **options)


def tables(run):
    """Whole tables by name: column, rows in order."""
    found = {}
    for shard in run.checkpointer.shards:
        for name, column in shard.columns.items():
            rows, cols = shard.table_shape
            shape = (rows, cols) if column.dim() == 2 else (rows,)
            key = (
                (shard.table_name, name) if column.dim() == 2 else (shard.table_name, name, shard.col_offset)
            )
            whole = found.setdefault(key, torch.full(shape, torch.nan))
            begin, end = shard.extent.rows
            part = whole[begin:end]
            (part[:, slice(*shard.extent.cols)] if part.dim() == 2 else part).copy_(column.detach())
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kinds", [*[(kind,) for kind in KINDS], KINDS, KINDS[::-1]], ids="-".join)
def test_old_rows_are_equal_and_new_ones_as_in_a_new_model(make, kinds, optimizer, caplog):
    small = make(kinds, SMALL, optimizer)
    small.save(3)
    saved = tables(small)
    small.checkpointer.close()

    large = make(kinds, LARGE, optimizer)
    built = tables(large)
    with pytest.raises(MismatchError, match="grow:a grow:b grow:c remove:gone add:new"):
        large.checkpointer.load()
    assert_same(built, tables(large))
    with caplog.at_level(logging.WARNING):
        assert large.checkpointer.load(changes=Changes.of(*WORDS)).state.step == 3
    assert "new rows keep their initial values in a (30 to 41 rows), b (17 to 64 rows)" in caplog.text
    assert "new, with initial values, are new" in caplog.text
    assert "dropped are gone" in caplog.text
    for (name, *column), whole in tables(large).items():
        old = SMALL.get(name, 0)
        assert torch.equal(whole[:old], saved.get((name, *column), whole)[:old]), (name, column)
        if (name, *column) in built:
            assert torch.equal(whole[old:], built[name, *column][old:]), (name, column)
        else:
            assert not whole[old:].any(), "state that the optimizer had not yet made"
    for shard in large.checkpointer.shards:
        if "iter" in shard.counters and len(kinds) == 1:
            assert shard.counters["iter"].item() == 3
    large.train(2)
    for shard in large.checkpointer.shards:
        assert shard.weights.isfinite().all()


def test_row_saves_after_growth_build_on_a_new_full_save(make, tmp_path):
    small = make(("tw", "rw"), SMALL)
    small.save(2)
    small.train(1)
    small.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.tensor([1, 5])})
    small.checkpointer.wait_until_idle()
    small.checkpointer.close()

    large = make(("tw", "rw"), LARGE)
    large.checkpointer.load(changes=Changes.of("grow:*", "add:*", "remove:*"))
    large.checkpointer.prepare()
    assert not large.checkpointer.has_base
    with pytest.raises(ValueError, match="needs a base"):
        large.checkpointer.save_rows({"ebc.embedding_bags.a/r0-c0": torch.tensor([40])})
    large.save(2)
    large.train(1)
    large.checkpointer.save_rows(
        {
            shard.name: torch.arange(shard.row_offset, shard.extent.rows[1])
            for shard in large.checkpointer.shards
        }
    )
    large.checkpointer.wait_until_idle()
    large.checkpointer.close()
    export(open_storage(str(tmp_path / "checkpoint")), "safetensors", tmp_path / "exported")
    (file,) = (tmp_path / "exported").glob("*.safetensors")
    exported = load_file(file)
    for (name, column, *_), whole in tables(large).items():
        if column == "weights":
            assert torch.equal(exported[f"model.ebc.embedding_bags.{name}.weight"], whole)

    again = make(("cw", "tw"), LARGE)
    assert again.checkpointer.load().state.step == 6
    found = tables(again)
    for key, whole in tables(large).items():
        if key[1] == "weights":
            assert torch.equal(found[key], whole), key


def test_new_rows_of_a_damaged_save_do_not_stay_where_a_smaller_one_is_loaded_instead(make, tmp_path):
    small = make(("tw",), {"a": 30, "b": 17})
    small.save(1)
    small.checkpointer.close()
    grown = {"a": 41, "b": 20}
    large = make(("tw",), grown)
    built = tables(large)
    large.checkpointer.load(changes=Changes.of("grow:*"))
    large.save(2)
    large.checkpointer.close()
    (path,) = tmp_path.glob("checkpoint/saves/00000001-*/*.b/*.arrow")
    flip_bit(path)  # a is in order, and would be read first
    again = make(("tw",), grown)
    assert again.checkpointer.load(changes=Changes.of("grow:*")).state.step == 1
    for (name, *column), whole in tables(again).items():
        old = {"a": 30, "b": 17}[name]
        assert torch.equal(whole[old:], built[name, *column][old:]), (name, column)


def test_changes_are_for_a_model_as_it_was_built(make):
    run = make(("tw",), SMALL)
    run.save(1)
    with pytest.raises(ValueError, match="build the model again"):
        run.checkpointer.load(changes=Changes.of("grow:*"))


def test_a_table_never_shrinks_and_keeps_its_columns(make):
    large = make(("tw",), {"a": 41})
    large.save(1)
    large.checkpointer.close()
    small = make(("tw",), {"a": 40})
    with pytest.raises(MismatchError, match=r"its size in this model: 40 x 8; in .*: 41 x 8"):
        small.checkpointer.load(changes=Changes.of("grow:*", "add:*", "remove:*", "reset:*"))


@pytest.mark.parametrize("word", ["a", "grow:", "shrink:a", ""])
def test_words_that_allow_nothing_are_refused(word):
    with pytest.raises(ValueError, match="write grow:NAME, add:NAME, remove:NAME or reset:NAME"):
        Changes.of("grow:b", word)


def test_words_that_allow_nothing_are_named():
    grown = Difference(kind="grow", name="user", text="", fqn="ebc.embedding_bags.user")
    words = ("grow:us*", "grow:typo", "remove:user", "grow:ebc.*", "add:*")
    assert Changes.of(*words).unneeded([grown]) == ["grow:typo", "add:*", "remove:user"]
