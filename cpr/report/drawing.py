"""Pieces of a page: charts in SVG, bars, tables and notes, without scripts.

A chart stretches to the width of the screen and its text does not, so labels are HTML beside the SVG. All
texts are escaped here: names, messages and paths come from users.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

POINTS: Final = 400
"""Points of a drawn line; of a longer one, neighbours are averaged."""
SIDE: Final = 1000
"""Height and width of a chart in its own units."""

TINY: Final = 1e-200
"""Ranges as small as this are drawn as one value."""

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart."""

    name: str
    points: Sequence[Point]
    """In the order of x."""
    marked: bool = False
    """Whether each point has a dot."""


def text(value: object) -> str:
    """Escaped text for any place of the page."""
    return html.escape(str(value).encode(errors="replace").decode())


def paragraph(what: object, style: str = "") -> str:
    """A paragraph; the style `unknown` is for what was not recorded."""
    return f'<p class="{style}">{text(what)}</p>' if style else f"<p>{text(what)}</p>"


def unknown(what: str) -> str:
    """A note that something is not known, and why."""
    return paragraph(what, "unknown")


def bullets(items: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{text(item)}</li>' for item in items)}</ul>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are figures."""
    top = "".join(f"<th>{text(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def tiles(figures: Mapping[str, str]) -> str:
    """The most important figures, by name, side by side."""
    cells = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in figures.items())
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def bar(parts: Mapping[str, float], most: float, names: Sequence[str]) -> str:
    """A bar of coloured parts, in the order of `names`, which give the colours; `most` fills the width."""
    whole = sum(parts.values())
    width = 100 * whole / most if most > 0 else 0
    pieces = "".join(
        f'<i class="c{names.index(name)}" style="width:{100 * value / whole:.3f}%"></i>'
        for name, value in parts.items()
        if value > 0
    )
    return f'<div class="bar" style="width:{width:.2f}%">{pieces}</div>'


def legend(names: Mapping[str, str], colours: Sequence[str]) -> str:
    """Names with their colours and a value each, which may be empty."""
    items = "".join(
        f'<span><i class="c{colours.index(name)}"></i>{text(f"{name} {value}".strip())}</span>'
        for name, value in names.items()
    )
    return f'<div class="legend">{items}</div>'


def chart(
    title: str,
    series: Sequence[Series],
    x_name: str,
    x_text: Format,
    y_text: Format,
    marks: Mapping[float, str] | None = None,
    from_zero: bool = False,
) -> str:
    """A line chart; a note that nothing was recorded if there are no points.

    Args:
        title: what is on the y axis.
        series: lines; empty ones are left out.
        x_name: what is on the x axis.
        x_text: text of a value on the x axis.
        y_text: likewise on the y axis.
        marks: texts by the place on the x axis where a dashed line stands.
        from_zero: whether the y axis begins at 0.
    """
    drawn = [each for each in series if each.points]
    if not drawn:
        return unknown(f"{title}: nothing is recorded.")
    points = [point for each in drawn for point in each.points]
    across = _Axis.over([x for x, _ in points])
    upwards = _Axis.over([y for _, y in points] + [0.0] * from_zero)
    shapes = [
        *(f'<path class="grid" d="M0 {SIDE - upwards.at(y):.1f}H{SIDE}"/>' for y in upwards.ticks),
        *(
            f'<path class="mark" d="M{across.at(x):.1f} 0V{SIDE}"><title>{text(what)}</title></path>'
            for x, what in (marks or {}).items()
            if across.low <= x <= across.high
        ),
    ]
    for colour, each in enumerate(drawn):
        places = [f"{across.at(x):.1f} {SIDE - upwards.at(y):.1f}" for x, y in thinned(each.points)]
        if len(places) > 1:
            shapes.append(f'<path class="line s{colour}" d="M{"L".join(places)}"/>')
        if each.marked or len(places) == 1:
            shapes.append(f'<path class="dots s{colour}" d="{"".join(f"M{at}h0" for at in places)}"/>')
    labels = "".join(
        f'<span class="{side}" style="{edge}:{axis.at(tick) / SIDE:.2%}">{text(shown(tick))}</span>'
        for side, edge, axis, shown in (("y", "bottom", upwards, y_text), ("x", "left", across, x_text))
        for tick in axis.ticks
    )
    names = [each.name for each in drawn]
    return (
        f'<figure><figcaption>{text(title)}</figcaption><div class="plot"><svg role="img" '
        f'aria-label="{text(title)}" viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none">'
        f"{''.join(shapes)}</svg>{labels}</div>"
        f'<div class="axis">{text(x_name)}</div>{legend(dict.fromkeys(names, ""), names)}</figure>'
    )


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `POINTS` points: means of neighbours."""
    size = max(1, math.ceil(len(points) / POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def over(cls, values: Sequence[float]) -> "_Axis":
        """An axis with round ticks, from the smallest value to the largest."""
        low, high = min(values), max(values)
        largest = max(abs(low), abs(high))
        if high - low <= max(1e-9 * largest, TINY):
            margin = largest / 2 if largest > TINY else 1.0
            low, high = low - margin, high + margin
        rough = (high - low) / 3
        power = 10.0 ** math.floor(math.log10(rough))
        step = power * max(each for each in (1, 2, 5) if each * power <= rough or each == 1)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return cls(low, high, [step * each for each in range(first, last + 1)])

    def at(self, value: float) -> float:
        """Distance from the beginning of the axis, of `SIDE`."""
        return SIDE * (value - self.low) / (self.high - self.low)
