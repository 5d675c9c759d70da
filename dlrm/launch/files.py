"""Writes files atomically: after a kill or on a full disk, the old or the new content is there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically write `content` as indented JSON."""
    replace_text(path, json.dumps(content, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Atomically replace the content of a file; an OSError names it.

    Devices and pipes, such as `/dev/stdout`, are written to.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk shows in a write, which knows no name
        raise
