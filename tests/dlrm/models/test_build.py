"""Models that a configuration names: built-in ones, and classes of the user with their mistakes."""

import sys

import pytest
import torch
from torch import nn

from data.criteo import DENSE_NAMES
from dlrm.config.schema import MODELS, ModelConfig
from dlrm.models.build import BUILT_IN, build_model, model_class


class Given(nn.Module):
    """Keeps what it was given."""

    def __init__(self, options, inputs):
        super().__init__()
        self.options, self.inputs = options, inputs
        if options.get("dim") == 3:
            raise KeyError("dim")


class WithoutInputs(nn.Module):
    def __init__(self, options):
        super().__init__()


class Exiting(nn.Module):
    def __init__(self, options, inputs):
        sys.exit(0)


no_class = 3


def build(kind, features, **options):
    return build_model(ModelConfig(kind=kind, options=options), features, DENSE_NAMES, torch.bfloat16)


def test_the_registry_holds_what_the_configuration_names():
    assert set(MODELS) == set(BUILT_IN)


def test_an_own_class_gets_its_options_and_the_data(features):
    model = build(f"{__name__}:Given", features, dim=32, mlp=[64, 1])
    assert type(model).__name__ == "Given"
    assert model.options == {"dim": 32, "mlp": [64, 1]}
    assert model.inputs.features == features
    assert model.inputs.dense == DENSE_NAMES
    assert (model.inputs.dtype, model.inputs.embedding_dim) == (torch.bfloat16, 16)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nowhere.at_all:Model", r"no module nowhere in .*Start in the folder .* PYTHONPATH"),
        (f"{__name__}.nothing:Model", r"no module .*test_build\.nothing in "),
        (f"{__name__}:Gievn", r"has no Gievn; did you mean .*:Given\?"),
        (f"{__name__}:no_class", "has a no_class that is no subclass of torch.nn.Module"),
        (f"{__name__}:WithoutInputs", r"WithoutInputs\(options, inputs\), .* too many positional arguments"),
    ],
)
def test_a_class_that_cannot_be_found(kind, message):
    with pytest.raises(ValueError, match=rf"model\.kind: .*{message}"):
        model_class(kind)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nowhere_to_be_found", "imports nowhere_to_be_found, which is not installed"),
        ("x = 1\ny = undefined", r"NameError: name 'undefined' is not defined \(.*own_model\.py, line 2\)"),
        ("import sys\nsys.exit(0)", r"SystemExit: 0 \(.*own_model\.py, line 2\)"),
        ("x = 1\ndef (", r"invalid syntax \(.*own_model\.py, line 2\)"),
    ],
)
def test_a_module_that_cannot_be_imported(code, message, tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"model.kind: own_model .*{message}"):
        model_class("own_model:Model")
    sys.modules.pop("own_model", None)


def test_an_error_of_the_class_names_its_line_and_options(features):
    with pytest.raises(ValueError, match=r"KeyError: 'dim' \(.*test_build.py, line \d+\).* \{'dim': 3\}"):
        build(f"{__name__}:Given", features, dim=3)
    with pytest.raises(ValueError, match=r"Exiting\(options, .* SystemExit: 0 \(.*test_build.py, line \d+\)"):
        build(f"{__name__}:Exiting", features)
