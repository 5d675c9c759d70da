"""Units of partitions, as positions keep them."""

from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import given

from data.stream import units
from data.stream.source import FoundUnit, Place
from data.stream.units import KnownUnits

NAMES = st.text(max_size=6)


@given(
    found=st.lists(
        st.lists(st.builds(FoundUnit, NAMES, st.integers(1, 9), st.booleans()), max_size=8), max_size=8
    ),
    places=st.lists(NAMES, min_size=8, max_size=8).map(sorted),
)
def test_a_position_has_what_is_not_read_and_some_of_what_is(found, places):
    known, all_found = KnownUnits(), []
    with patch.object(units, "KEPT", 3):
        for batch, name in zip(found, places, strict=False):
            known.add(batch)
            all_found = sorted([*all_found, *batch])
            encoded = known.encoded(Place(name))
            assert (encoded == b"") == (not all_found)
            if batch:
                kept, since = KnownUnits.decoded(encoded).known
                assert kept == known.known.units
                assert kept == tuple(all_found[len(all_found) - len(kept) :])
                assert sum(each.unit < name for each in kept) <= 3
                assert len(kept) == len(all_found) or since == kept[0].unit


def test_what_does_not_change_is_not_encoded_again():
    known = KnownUnits()
    known.add(FoundUnit(f"{number:02d}", 1) for number in range(10))
    assert known.encoded(Place("04")) is known.encoded(Place("00"))
