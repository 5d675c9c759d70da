"""Writes a program as ONNX, by PyTorch's own exporter."""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from dlrm.inference.program.tracing import MOST_CHARACTERS
from dlrm.scorer import METADATA_NAME


def write_onnx(exported: ExportedProgram, path: Path, described: dict[str, Any]) -> None:
    """Write a program with its metadata in one file, which ONNX limits to 2 GB.

    Raises:
        ValueError: the exporter is not installed, or does not take the program; says why.
    """
    try:
        import onnxscript  # noqa: F401, PLC0415  # an optional dependency
    except ImportError as error:
        raise ValueError("--format onnx needs onnx and onnxscript: pip install '.[onnx]'") from error
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(exported, dynamo=True, verbose=False)
            assert program is not None
            program.model.metadata_props[METADATA_NAME] = json.dumps(described)
            program.save(path, external_data=False)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:MOST_CHARACTERS]
        raise ValueError(
            f"--format onnx: PyTorch's exporter does not take this program ({reason}); use --format pt2"
        ) from error
