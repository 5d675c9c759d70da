import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.humanize import duration_text, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5.6m", 336),
        ("5.6 min", 336),
        ("28h", 100_800),
        ("2d", 172_800),
        ("1h30m", 5400),
        ("1d 2h 3m 4s", 93_784),
        ("250ms", 0.25),
        (".5H", 1800),
        ("0s", 0),
    ],
)
def test_durations_are_parsed(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", " ", "5", "-5m", "5 parsecs", "m", "1h30", "nan", "5m,", "1e3s", "1.2.3s"]
)
def test_invalid_durations_are_refused_with_examples(text):
    with pytest.raises(ValueError, match=r"write a number with its unit: 90s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (-336, "-5.6 min"),
        (0.0042, "4.2 ms"),
        (59.97, "60 s"),
        (60, "1 min"),
        (90, "1.5 min"),
        (8229.4, "2.29 h"),
        (345_599, "96 h"),
        (161_280, "44.8 h"),
        (345_600, "4 d"),
        (86_400 * 1234.5, "1,230 d"),
    ],
)
def test_durations_are_formatted(seconds, text):
    assert duration_text(seconds) == text


@given(st.floats(1e-3, 1e8))
def test_formatted_durations_can_be_parsed(seconds):
    assert parse_duration(duration_text(seconds).replace(",", "")) == pytest.approx(seconds, rel=5.1e-3)
