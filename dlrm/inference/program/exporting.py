"""Writes the program of a run: traced, compared with the model, and renamed when it is complete."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from cpr.checkpoint.storage.local import sync_folder
from cpr.humanize import size_text
from data.batch import Batch
from data.dataset import DatasetManifest
from data.loader import DataLoader, LoaderConfig
from dlrm.config.dataset import open_manifest
from dlrm.config.recipe import load_resumed
from dlrm.inference.columns import check_columns
from dlrm.inference.opening import Save
from dlrm.inference.program.metadata import describe_program
from dlrm.inference.program.onnx import write_onnx
from dlrm.inference.program.saved import load_whole
from dlrm.inference.program.tables import PooledTables, RowFormat, SequenceTables
from dlrm.inference.program.tracing import Inputs, Program, example, features_with_one_id, inputs_of, trace
from dlrm.models.build import build_model
from dlrm.optim.build import arithmetic_dtype
from dlrm.scorer import METADATA_NAME
from dlrm.telemetry.folder import trained_manifest
from dlrm.training.encoding import refuse_other_encoding
from dlrm.training.model import with_dynamic_rows

logger = logging.getLogger(__name__)

COMPARED_SAMPLES: Final = 256
"""Samples of the data on which a program is compared with its model."""
PROGRAM_BYTES: Final = 8 * 2**20
"""Room for a program besides its weights."""
TOLERANCE: Final = 1e-4
"""Larger differences of a program from its model, relative to the outputs, are errors of tracing."""


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """What to export, and how."""

    run: Path
    out: Path
    rows: RowFormat = "fp32"
    save: Save = "newest"
    format: Literal["pt2", "onnx"] = "pt2"


def export(job: ExportJob) -> None:
    """Export a run as a program; in this process alone, on the CPU.

    Raises:
        ValueError: a mistake of the user, a model that cannot be traced, or too little memory.
        OSError: data cannot be read, or the output cannot be written.
        CheckpointError: no save can be read.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("an export is made by one process: start it without torchrun")
    if job.out.exists():
        raise ValueError(f"{job.out} exists; remove it, or choose another --out")
    _, config = load_resumed(job.run)
    manifest, saves = open_manifest(config.data), config.checkpoint
    refuse_other_encoding(job.run, manifest, config.data.uri)
    if trained := trained_manifest(job.run):
        check_columns(config.tables, trained, manifest, config.data.uri)
    uri = saves.best_directory(job.run) if job.save == "best" else saves.directory(job.run)
    features = with_dynamic_rows(config.tables, manifest.features)

    def make(dtype: torch.dtype = torch.float32) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            return build_model(config.model, features, manifest.dense, dtype)

    model, state = load_whole(uri, make, job.rows)
    program, kind = Program(model, features), config.model.kind
    samples = inputs_of(_first_batch(config.data.uri, manifest), features)
    exported, with_one_id = _traced(program, samples, kind)
    _compare(exported, program, samples, kind)
    one = example(features, len(manifest.dense), num_samples=1, with_one_id=with_one_id)
    takes_one = _takes(exported, one)
    if takes_one:
        _compare(exported, program, one, kind)
    else:
        logger.warning("the program of %s takes two samples or more, but not one alone", kind)
    described = describe_program(job.run, config, manifest, state, job.rows)
    described |= {"with_one_id": with_one_id, "least_samples": 1 if takes_one else 2}
    if config.train.precision != "fp32":
        difference = _difference(program, make(arithmetic_dtype(config.train.precision)), samples)
        described["model"]["largest_difference"] = difference
        logger.info(
            "the run was trained in %s and the program computes in fp32: on %d samples of the data, its "
            "logits differ by at most %.2g",
            config.train.precision,
            COMPARED_SAMPLES,
            difference,
        )
    num_bytes = PROGRAM_BYTES + sum(tensor.nbytes for tensor in exported.state_dict.values())
    with _appearing(job.out, num_bytes) as path:
        if job.format == "onnx":
            write_onnx(exported, path, described)
        else:
            extra_files = {METADATA_NAME: json.dumps(described, indent=1)}
            torch.export.save(exported, path, extra_files=extra_files)
    size = size_text(job.out.stat().st_size)
    logger.info("exported the model of step %d to %s, %s", state.step, job.out, size)


def _traced(program: Program, samples: Inputs, kind: str) -> tuple[ExportedProgram, list[str]]:
    """The program for any numbers of ids; else for one id where the data has one, with those features."""
    num_dense, with_one_id = samples[0].shape[1], features_with_one_id(samples)
    try:
        return trace(program, num_dense, kind), []
    except ValueError:
        if not with_one_id:
            raise
        try:  # a model without pooling may count on as many ids as samples
            return trace(program, num_dense, kind, with_one_id), with_one_id
        except ValueError:
            pass
        raise


def _takes(exported: ExportedProgram, inputs: Inputs) -> bool:
    """Whether the shapes of inputs are among those that a program was traced for."""
    try:
        exported.module()(*inputs)
    except AssertionError:
        return False
    return True


def _compare(exported: ExportedProgram, program: Program, inputs: Inputs, kind: str) -> None:
    """Refuse a program that gives other outputs than its model.

    Raises:
        ValueError: says how large the difference is.
    """
    with torch.no_grad():
        ours, theirs = _tensors(exported.module()(*inputs)), _tensors(program(*inputs))
    for found, expected in zip(ours, theirs, strict=True):
        limit = TOLERANCE * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        if not torch.allclose(found, expected, rtol=0, atol=limit, equal_nan=True):
            raise ValueError(
                f"model.kind: the program of {kind} gives other outputs than the model, by "
                f"{(found - expected).abs().max():g}: its forward depends on values, on the number of "
                "samples, or on its own state, which torch.export has taken for constants"
            )


def _difference(program: Program, trained: nn.Module, inputs: Inputs) -> float:
    """Largest difference of the outputs from those in the arithmetic of the training.

    `trained` is the same model in that arithmetic, without values.
    """
    for path, module in program.model.named_modules():
        if isinstance(module, PooledTables | SequenceTables):
            parent, _, name = path.rpartition(".")
            setattr(trained.get_submodule(parent), name, module)
    trained.load_state_dict(program.model.state_dict(), assign=True)
    other = Program(trained.eval(), program.features)
    with torch.no_grad():
        pairs = zip(_tensors(program(*inputs)), _tensors(other(*inputs)), strict=True)
        return max(float((ours.float() - theirs.float()).abs().max()) for ours, theirs in pairs)


def _first_batch(uri: str, manifest: DatasetManifest) -> Batch:
    loader_config = LoaderConfig(
        batch_size=COMPARED_SAMPLES, shuffle=False, drop_last=False, window_batches=1, prefetch=1
    )
    with closing(DataLoader(uri, loader_config, days=manifest.days[-1:])) as loader:
        return next(iter(loader))


def _tensors(outputs: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(outputs) if isinstance(each, Tensor)]


@contextmanager
def _appearing(out: Path, num_bytes: int) -> Iterator[Path]:
    """A path with the file name of `out` in a folder next to it, which gets its place after the block."""
    folder = out.absolute().with_name(f"{out.name}.unfinished")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of an export that was killed
        folder.mkdir(parents=True)
        free = shutil.disk_usage(folder).free
        if free < num_bytes:  # PyTorch's writer would end the process
            raise OSError(
                errno.ENOSPC,
                f"{out} needs {size_text(num_bytes)}, and its disk has {size_text(free)} left: free some",
            )
        yield folder / out.name
        with (folder / out.name).open("rb") as file:
            os.fsync(file.fileno())
        (folder / out.name).replace(out)
        sync_folder(out.absolute().parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
