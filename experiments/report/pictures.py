"""All experiments' pictures, drawn again from the stored results without measuring.

An experiment takes part with a function `draw(result, folder)` in `experiments.NAME.picture`,
`experiments.NAME.run` or `experiments.NAME`: `result` is its stored JSON object, `folder` gets `NAME.png`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from PIL import Image

from experiments.report.results import Result

NUM_COLORS: Final = 256
"""Of a stored picture: lines and bars need no more, and the file is a third as large."""

Draw = Callable[[Mapping[str, Any], Path], object]


def redraw(result: Result, folder: Path) -> None:
    """Draw the pictures of a finished result into `folder`."""
    draw = _draw_function(result.name)
    if draw is not None and result.is_finished:
        draw(result.body, folder)


def shrink(path: Path) -> None:
    """Store a picture with few colours, unless it has few already."""
    with Image.open(path) as image:
        if image.mode == "P":
            return
        small = image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def _draw_function(name: str) -> Draw | None:
    for module in (f"experiments.{name}.picture", f"experiments.{name}.run", f"experiments.{name}"):
        if _exists(module) and (draw := getattr(import_module(module), "draw", None)):
            function: Draw = draw
            return function
    return None


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False
