"""Files that are replaced atomically: a kill or a full disk leaves the old or the new."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` for people to read as well; a kill leaves the old or the new."""
    replace_text(path, json.dumps(content, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Put `text` in the place of what is in a file; a kill or a full disk leaves the old or the new."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
