"""Whether data gives a model the inputs that the data had on which it was trained.

Values may have other ids, and columns another order. A run folder keeps the manifest of its data, as the data
set itself may be made again at the same place.
"""

import logging
from pathlib import Path

from data.dataset import DatasetManifest
from data.encoding import differing_inputs
from dlrm.config.schema import Config
from dlrm.telemetry.folder import trained_manifest

logger = logging.getLogger(__name__)


def other_order(trained: DatasetManifest, given: DatasetManifest) -> str:
    """Say which columns of both come in another order there, which a model does not notice; empty if none."""
    for what, ours, theirs in (
        ("dense columns", trained.dense, given.dense),
        ("features", _features(trained), _features(given)),
    ):
        former, now = [name for name in ours if name in theirs], [name for name in theirs if name in ours]
        if former != now:
            return f"its {what} come in another order: {', '.join(now)} instead of {', '.join(former)}"
    return ""


def refuse_other_encoding(folder: Path, manifest: DatasetManifest, uri: str) -> None:
    """Refuse the data set of a run if it was made again with other inputs.

    Args:
        folder: of the run; one that does not know its data yet takes any.
        manifest: of the data set, as it is now.
        uri: of the data set.

    Raises:
        ValueError: names the inputs.
    """
    trained = trained_manifest(folder)
    if trained is None:
        return
    advice = "Put a copy of the former data set there, or train a new run"
    again = f"{uri} was made again since {folder} was trained on it"
    if difference := other_order(trained, manifest) or _other_dense(trained, manifest):
        raise ValueError(f"{again}, and {difference}. {advice}")
    if others := differing_inputs(trained, manifest):
        raise ValueError(
            f"{again}, with other vocabularies, means or rules of {', '.join(others)}: ids mean other values "
            f"now. {advice}"
        )


def refuse_other_order(config: Config, manifest: DatasetManifest) -> None:
    """Refuse data for a warm start whose columns come in another order, where the other run's are known.

    Raises:
        ValueError: names both orders.
    """
    trained = _of_warm_start(config)
    difference = other_order(trained, manifest) if trained is not None else ""
    if difference:
        raise ValueError(
            f"{config.data.uri} does not fit a warm start from {config.train.warm_start}: {difference}, so "
            "that its weights would read other columns. Put them into that order in the schema, and make "
            "the data set again"
        )


def warn_of_other_inputs(config: Config, manifest: DatasetManifest, keeps_dense: bool) -> None:
    """Warn if data gives the model of a warm start other inputs, where those of the other run are known.

    `keeps_dense` says whether some dense tensors were loaded.
    """
    trained, source = _of_warm_start(config), config.train.warm_start
    if trained is None:
        return
    if difference := _other_dense(trained, manifest):
        logger.warning(
            "%s is not what %s was trained on: %s. Its weights read them as if they were the same",
            config.data.uri,
            source,
            difference,
        )
    features = [_features(each) for each in (trained, manifest)]
    if keeps_dense and features[0] != features[1]:
        logger.warning(
            "the features changed from %s to %s, and dense weights of equal shape were kept, though their "
            "inputs may have moved: --allow reset:TENSOR (or reset:*, for all) lets them start anew",
            *map(", ".join, features),
        )
    if others := differing_inputs(trained, manifest):
        logger.warning(
            "%s has other vocabularies, means or rules than the data of which %s was trained, of %s: rows of "
            "tables stand for other values. Unless that is meant, convert its raw rows with "
            "`python -m data.convert --like` and that data set",
            config.data.uri,
            source,
            ", ".join(others),
        )


def _of_warm_start(config: Config) -> DatasetManifest | None:
    return trained_manifest(Path(config.train.warm_start).parent)


def _features(manifest: DatasetManifest) -> list[str]:
    return [feature.name for feature in manifest.features]


def _other_dense(trained: DatasetManifest, given: DatasetManifest) -> str:
    """Say which other dense columns stand in the places of as many; a layer notices another number."""
    if trained.dense == given.dense or len(trained.dense) != len(given.dense):
        return ""
    return f"its dense columns are {', '.join(given.dense)} instead of {', '.join(trained.dense)}"
