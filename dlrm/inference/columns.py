"""The columns of a data set that a trained model is used on: those of the run, with or without labels."""

from collections.abc import Sequence

from data.dataset import DatasetManifest, Feature
from data.encoding import differing_inputs
from dlrm.config.schema import TablesConfig
from dlrm.training.encoding import other_order
from dlrm.training.model import with_dynamic_rows


def check_columns(tables: TablesConfig, trained: DatasetManifest, given: DatasetManifest, uri: str) -> None:
    """Refuse data whose columns are not those of the run, in the same order, or are encoded otherwise.

    Args:
        tables: of the run; rows of its dynamic tables may differ.
        trained: of the data that the run was trained on.
        given: of the data to refuse.
        uri: of that data.

    Raises:
        ValueError: names the first difference.
    """
    difference = (
        _others("dense columns", trained.dense, given.dense)
        or _others("features", _names(trained), _names(given))
        or other_order(trained, given)
        or _rows(*(with_dynamic_rows(tables, each.features) for each in (trained, given)))
        or _label(trained, given)
    )
    if difference:
        raise ValueError(
            f"{uri} does not fit the run: {difference}. Prepare it as the run's data was, with the same "
            "columns and vocabularies"
        )
    others = differing_inputs(trained, given)
    if others:
        raise ValueError(
            f"{uri} does not fit the run: its vocabularies, means or rules are not those of the run's data, "
            f"of {', '.join(others)}. Convert its raw rows with `python -m data.convert --like` and the "
            "run's data set (Criteo's logs: prepare them together with the run's)"
        )


def _names(manifest: DatasetManifest) -> list[str]:
    return [feature.name for feature in manifest.features]


def _others(what: str, trained: Sequence[str], given: Sequence[str]) -> str:
    missing = [name for name in trained if name not in given]
    more = [name for name in given if name not in trained]
    lacks = f"it lacks {', '.join(missing)}" if missing else ""
    has = f"it has {', '.join(more)}, which the run does not know" if more else ""
    return f"among its {what}, {' and '.join(filter(None, (lacks, has)))}" if missing or more else ""


def _rows(trained: Sequence[Feature], given: Sequence[Feature]) -> str:
    for ours, theirs in zip(trained, given, strict=True):
        if ours != theirs:
            return f"feature {ours.name} was trained as {ours}, and is {theirs} there"
    return ""


def _label(trained: DatasetManifest, given: DatasetManifest) -> str:
    return (
        "" if trained.label == given.label else f"its label is {given.label}, and the run's {trained.label}"
    )
