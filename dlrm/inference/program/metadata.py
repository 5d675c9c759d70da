"""What an exported program is: its inputs, where it comes from, and how raw rows become its inputs."""

import json
import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import torch

from cpr.checkpoint.catalog.chain import State
from data.dataset import DatasetManifest
from data.schema import Encoder
from dlrm.config.schema import Config

FORMAT_VERSION: Final = 1

logger = logging.getLogger(__name__)


def describe_program(
    folder: Path, config: Config, manifest: DatasetManifest, state: State, rows: str
) -> dict[str, Any]:
    """The metadata of a program, as JSON; `encoder` is None if the data was not made from raw rows."""
    return {
        "format": "cpr-program",
        "version": FORMAT_VERSION,
        "dense": list(manifest.dense),
        "features": [
            {"name": feature.name, "rows": feature.rows, "weights": feature.weights}
            for feature in manifest.features
        ],
        "label": manifest.label,
        "rows": rows,
        "tables": {
            fqn: {"rows": table.rows, "columns": table.cols} for fqn, table in state.newest.tables.items()
        },
        "model": {"kind": config.model.kind, "trained_in": config.train.precision},
        "run": {
            "folder": str(folder.resolve()),
            "run_id": state.newest.run_id,
            "step": state.step,
            "saved": state.newest.created,
            "auc": _auc_at(folder, state.step),
        },
        "made_with": {"torch": torch.__version__, "cpr-trainer": _version()},
        "encoder": _encoder(config.data.uri),
    }


def _auc_at(folder: Path, step: int) -> float | None:
    """AUC of the run's evaluation at a step, if there was one."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return None
    found = [entry for line in lines if (entry := _entry(line)).get("step") == step]
    of_evaluations = [entry.get("auc") for entry in found if entry.get("kind") == "evaluation"]
    return of_evaluations[-1] if of_evaluations else None


def _entry(line: str) -> Mapping[str, Any]:
    try:
        entry: Mapping[str, Any] = json.loads(line)
    except ValueError:  # the last line of a run that is still writing it
        return {}
    return entry


def _encoder(uri: str) -> Mapping[str, str] | None:
    try:
        return Encoder.of_dataset(uri).state()
    except (ValueError, KeyError) as error:
        logger.warning("the program takes rows of a data set, and no raw rows: %s", error)
        return None


def _version() -> str:
    try:
        return metadata.version("cpr-trainer")
    except metadata.PackageNotFoundError:
        return "0+unknown"
