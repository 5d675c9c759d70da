"""Synthetic data of few features: whatever plans, shards or saves tables takes time for each of them."""

import json
from pathlib import Path

from data.dataset import MANIFEST_NAME
from data.synthetic import SyntheticConfig, generate

NUM_FEATURES = 9


def generate_few(config: SyntheticConfig, folder: Path) -> Path:
    """Generate data whose manifest has only the first features; the parts hold the other columns, too."""
    generate(config, folder)
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    del manifest["features"][NUM_FEATURES:]
    path.write_text(json.dumps(manifest))
    return folder
