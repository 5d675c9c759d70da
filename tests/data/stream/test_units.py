"""Units of partitions, as positions keep them."""

import hypothesis.strategies as st
from hypothesis import given

from data.stream.source import FoundUnit, Place
from data.stream.units import UnreadUnits

NAMES = st.text(max_size=6)


@given(
    found=st.lists(st.lists(st.builds(FoundUnit, NAMES, st.integers(1, 9)), max_size=8), max_size=8),
    places=st.lists(NAMES, min_size=9, max_size=9).map(sorted),
)
def test_a_position_has_the_units_from_its_place_on(found, places):
    units, known = UnreadUnits(), []
    for batch, name in zip([*found, []], places, strict=False):
        units.add(batch)
        known += batch
        left = sorted(each for each in known if each.unit >= name)
        for each in (units, UnreadUnits(units.encoded(Place(name)))):
            assert each.since(Place(name)) == left
        assert (units.encoded(Place(name)) == b"") == (not left)


def test_what_does_not_change_is_not_encoded_again():
    units = UnreadUnits()
    units.add(FoundUnit(f"{number:02d}", 1) for number in range(10))
    kept = units.encoded(Place("00"))
    assert units.encoded(Place("04")) is kept
    assert len(UnreadUnits(units.encoded(Place("05"))).since(Place())) == 5
