"""JSON that may be forged: each fault is a ValueError with the path to it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.strict_json import build, parse


@dataclass(frozen=True)
class Leaf:
    size: int
    share: float = 1.0


@dataclass(frozen=True)
class Tree:
    kind: Literal["a", "b"]
    shape: tuple[int, int]
    leaves: Sequence[Leaf]
    by_name: Mapping[str, Leaf | None] = field(default_factory=dict)
    counters: Mapping[str, int | float] = field(default_factory=dict)
    is_done: bool = False
    pairs: tuple[tuple[int, str], ...] | None = None


WHOLE = {
    "kind": "b",
    "shape": [1, 2],
    "leaves": [{"size": 3}, {"size": 4, "share": 0.5}],
    "by_name": {"x": {"size": 2**63 - 1}, "y": None},
    "counters": {"iter": -7, "rate": -0.5},
    "is_done": True,
    "pairs": [[1, "x"], [2, "y"]],
}


def test_fields_are_built_from_their_annotations():
    assert build(Tree, WHOLE) == Tree(
        kind="b",
        shape=(1, 2),
        leaves=(Leaf(3), Leaf(4, 0.5)),
        by_name={"x": Leaf(2**63 - 1), "y": None},
        counters={"iter": -7, "rate": -0.5},
        is_done=True,
        pairs=((1, "x"), (2, "y")),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "c"}, "kind is 'c', not one of 'a', 'b'"),
        ({"kind": ["a"]}, "kind is a list of 1, not one of"),
        ({"shape": [1]}, "shape is a list of 1, not a list of 2"),
        ({"shape": [1, -2]}, "shape[1] is -2, not a whole number from 0 on"),
        ({"shape": [1, True]}, "shape[1] is True, not a whole number"),
        ({"leaves": [{"size": 3}, {"size": 2**63}]}, "leaves[1].size is a number beyond 64 bits"),
        ({"leaves": [{"size": 10**5000}]}, "leaves[0].size is a number beyond 64 bits"),
        ({"leaves": [{}]}, "leaves[0] lacks 'size'"),
        ({"leaves": [{"size": 1, "more": 2}]}, "leaves[0] has 'more', which this program does not know"),
        ({"leaves": [{"size": 1, "share": float("nan")}]}, "leaves[0].share is nan, not a finite number"),
        ({"leaves": [{"size": 1, "share": -0.5}]}, "leaves[0].share is -0.5, which is below 0"),
        ({"leaves": {}}, "leaves is an object of 0, not a list"),
        ({"by_name": {"x": 7}}, "by_name['x'] is 7, not an object"),
        ({"by_name": {"\ud800": None}}, "by_name is '\\ud800', which is no Unicode text"),
        ({"counters": {"x": "7"}}, "counters['x'] is '7', not a finite number"),
        ({"counters": {"x": 2**70}}, "counters['x'] is a number beyond 64 bits"),
        ({"pairs": [[1, "x"], [1, 2]]}, "pairs[1][1] is 2, not a text"),
        ({"is_done": 1}, "is_done is 1, neither true nor false"),
    ],
)
def test_faults_are_reported_with_their_path(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        build(Tree, {**WHOLE, **change})
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": {"b": 1, "b": 1}}', "it has 'b' twice"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("{", "Expecting property name"),
        (b"\xff\xfe\x00", "decode"),
        ("1" * 5000, "digits"),
    ],
)
def test_invalid_json_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.dictionaries(st.sampled_from([*WHOLE, "size", "other"]), JSON))
def test_any_json_is_built_or_a_value_error(value):
    try:
        built = build(Tree, value)
    except ValueError:
        return
    assert isinstance(built, Tree)
