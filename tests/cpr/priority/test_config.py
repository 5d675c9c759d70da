"""Configurations of priority saving, and the prioritised tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.priority import PriorityConfig
from cpr.priority.covering import fused_tables, largest_tables, table_sizes
from data.criteo import KAGGLE_CARDINALITIES
from tests.cpr.shards.models import bags, sequences, shard


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scheme": "lru"}, "scheme is 'lru'; choose one of mfu, ssu, scar"),
        ({"ratio": 0.0}, r"ratio is 0.0; choose a share of rows above 0, at most 1"),
        ({"ratio": 1.5}, r"ratio is 1.5"),
        ({"ratio": float("nan")}, "ratio must be finite, not nan"),
        ({"sampling_period": 0}, "sampling_period is 0; 1 takes every lookup"),
        ({"covering": 1.01}, "covering is 1.01; 0 prioritises no table"),
        ({"covering": -0.1}, "covering is -0.1"),
    ],
)
def test_impossible_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        PriorityConfig(**wrong)


def test_seven_tables_of_criteo_kaggle_are_prioritised():
    sizes = {f"cat_{number}": rows for number, rows in enumerate(KAGGLE_CARDINALITIES)}
    chosen = largest_tables(sizes, PriorityConfig().covering)
    assert len(chosen) == 7
    assert sum(sizes[name] for name in chosen) / sum(sizes.values()) == pytest.approx(0.9958, abs=5e-5)


@given(
    st.dictionaries(st.text("ab", max_size=4), st.integers(1, 50), min_size=1),
    st.floats(0, 1),
)
def test_fewest_tables_that_cover_the_share_are_prioritised(sizes, covering):
    chosen = largest_tables(sizes, covering)
    held = sum(sizes[name] for name in chosen)
    assert held >= covering * sum(sizes.values())
    others = [rows for name, rows in sizes.items() if name not in chosen]
    if chosen:
        assert min(sizes[name] for name in chosen) >= max(others, default=0)
        assert held - min(sizes[name] for name in chosen) < covering * sum(sizes.values())


def test_sizes_and_fused_tables_of_a_model(world_of_one):
    model = shard(
        {"a": "tw", "b": "cw", "c": "rw", "d": "dp", "e": "unfused"},
        bags=bags(a=10, b=7, c=12, d=5, e=6),
        seq=sequences(a=9),
    )
    sizes = {
        f"bags.embedding_bags.{name}": rows for name, rows in zip("abcde", (10, 7, 12, 5, 6), strict=True)
    }
    assert table_sizes(model) == {**sizes, "seq.embeddings.a": 9}
    assert fused_tables(model) == {*list(sizes)[:3], "seq.embeddings.a"}
