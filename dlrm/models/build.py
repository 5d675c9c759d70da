"""Builds the model that a configuration names: a built-in one, or a class of the user."""

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from data.dataset import Feature
from dlrm.config.schema import ModelConfig
from dlrm.models.contract import ModelInputs
from dlrm.models.dcn import DCNv2
from dlrm.models.deepfm import DeepFM
from dlrm.models.dlrm import DLRM
from dlrm.models.fm import FactorizationMachine, LogisticRegression

BUILT_IN: Final[Mapping[str, type[nn.Module]]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "deepfm": DeepFM,
    "fm": FactorizationMachine,
    "lr": LogisticRegression,
}
"""The models of `dlrm.config.schema.MODELS`."""


def build_model(
    config: ModelConfig, features: Sequence[Feature], dense: Sequence[str], dtype: torch.dtype
) -> nn.Module:
    """Build the model of `config.kind`, its tables on the meta device and its dense part on the CPU.

    `features` are in canonical order, with the rows of their tables; `dense` are the names of the dense
    features. `dtype` is that of the arithmetic, float32 or bfloat16 (mixed precision); parameters are fp32.

    Raises:
        ValueError: a class of the user cannot be found or made; says what to change.
    """
    inputs = ModelInputs(features=features, dense=dense, dtype=dtype, embedding_dim=config.embedding_dim)
    cls = model_class(config.kind)
    if not config.is_own:
        return cls(config.of_built_in, inputs)
    try:
        return cls(config.options, inputs)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"model.kind: {config.kind}(options, inputs) raised {describe(error, cls.__module__)}; "
            f"model.options are {dict(config.options)}"
        ) from error


def model_class(kind: str) -> type[nn.Module]:
    """The class of a built-in model, or the user's, imported as `package.module:Class`.

    Raises:
        ValueError: there is no such module or class; says where was looked, or what failed in it.
    """
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    name, _, wanted = kind.partition(":")
    module = _import(name)
    cls = getattr(module, wanted, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        known = [each for each, value in vars(module).items() if _is_model(value, name)]
        close = difflib.get_close_matches(wanted, known, n=1) or known
        hint = f"; did you mean {name}:{close[0]}?" if close else ""
        what = f"has no {wanted}" if cls is None else f"has a {wanted} that is no subclass of torch.nn.Module"
        raise ValueError(f"model.kind: {module.__file__} {what}{hint}")
    try:
        inspect.signature(cls).bind({}, None)
    except TypeError as error:
        raise ValueError(
            f"model.kind: {kind} must be made by {wanted}(options, inputs), and its __init__ does not take "
            f"that: {error}"
        ) from error
    return cls


def describe(error: BaseException, module: str) -> str:
    """An error of a module of the user in one line: its type, its message, and the user's last line."""
    path = getattr(sys.modules.get(module), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    theirs = [each for each in frames if each.filename == path or not _is_of_library(each.filename)]
    place = next(iter(theirs), frames[0])
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({place.filename}, line {place.lineno})"


def _is_of_python(folder: str) -> bool:
    """Whether an entry of the search path belongs to Python itself or holds installed packages."""
    return "site-packages" in folder or folder.startswith(sys.base_prefix)


def _is_of_library(file: str) -> bool:
    """Whether a file is one of the installed packages or of this one."""
    return "site-packages" in file or Path(file).is_relative_to(Path(__file__).parents[1])


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"model.kind: {name} imports {error.name}, which is not installed") from error
        searched = ", ".join(path or str(Path.cwd()) for path in sys.path if not _is_of_python(path))
        raise ValueError(
            f"model.kind: there is no module {error.name} in {searched} or the installed packages. Start in "
            "the folder that holds it, add that folder to PYTHONPATH on every node, or install it"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"model.kind: {name} cannot be imported: {_import_error(error)}") from error


def _import_error(error: BaseException) -> str:
    """The error of an import with its file and line."""
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({error.filename}, line {error.lineno})"
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "importlib" not in each.filename]
    return f"{type(error).__name__}: {error} ({frames[-1].filename}, line {frames[-1].lineno})"


def _is_model(value: Any, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module
