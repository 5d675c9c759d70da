"""Data sets that experiments train on, and their identity, which is part of a result's `config`."""

import hashlib
from pathlib import Path

from data.dataset import MANIFEST_NAME, open_folder
from data.synthetic import SyntheticConfig, generate
from experiments.harness.launch import ROOT
from experiments.harness.record import QUICK


def identity_of(dataset: str) -> str:
    """Digest of a prepared data set's manifest, which itself holds a digest of every file.

    Args:
        dataset: folder or URI.

    Raises:
        OSError: the data set is absent.
    """
    filesystem, path = open_folder(dataset)
    with filesystem.open_input_stream(f"{path}/{MANIFEST_NAME}") as stream:
        return hashlib.sha256(stream.read()).hexdigest()[:24]


def default_dataset(quick: bool) -> Path:
    """The data set of `make train`, or a small one for a quick run; generated if it is absent."""
    if quick:
        return generated(SyntheticConfig(rows_per_day=10_000, days=2), QUICK / "dataset")
    return generated(SyntheticConfig(), ROOT / "datasets" / "tiny")


def generated(config: SyntheticConfig, folder: Path) -> Path:
    """The folder of a data set, which is generated if it is absent."""
    if not (folder / MANIFEST_NAME).is_file():
        generate(config, folder)
    return folder
