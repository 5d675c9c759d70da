"""The data set that a configuration names: its days, and the steps and samples of a run."""

from data.dataset import DatasetManifest, read_manifest
from dlrm.config.schema import Config, DataConfig


def open_manifest(data: DataConfig) -> DatasetManifest:
    """Read the manifest of the data; errors name the key `data.uri`.

    Raises:
        ValueError: there is no data set.
        OSError: the manifest cannot be read.
    """
    try:
        return read_manifest(data.uri)
    except ValueError as error:
        raise ValueError(f"data.uri: {error}") from error
    except OSError as error:
        raise OSError(f"data.uri: {error}") from error


def split_days(config: Config, manifest: DatasetManifest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Days to train on, none if samples stream in, and days to evaluate on.

    Raises:
        ValueError: no training days are left.
    """
    data = config.data
    test_days = data.test_days or manifest.days[-1:]
    if config.stream.uri:
        return (), test_days
    train_days = data.train_days or tuple(day for day in manifest.days if day not in set(test_days))
    if not train_days:
        raise ValueError(
            f"{data.uri} has only day {list(manifest.days)}, which is the test day; prepare more days, "
            "or set data.train_days and data.test_days"
        )
    return train_days, test_days


def total_samples(config: Config, manifest: DatasetManifest) -> int | None:
    """Samples that the whole run trains on, over all ranks; None: nobody knows, as they stream in."""
    data, train = config.data, config.train
    if config.stream.uri:
        return train.max_steps * data.global_batch_size or None
    train_days, _ = split_days(config, manifest)
    steps = manifest.on_days(train_days).num_rows // data.global_batch_size * train.epochs
    return min(steps, train.max_steps or steps) * data.global_batch_size


def best_auc(test: DatasetManifest) -> float | None:
    """AUC of the planted teacher on the test day, for synthetic data; else None."""
    days = test.provenance.get("days", {})
    if len(test.days) != 1 or str(test.days[0]) not in days:
        return None
    return float(days[str(test.days[0])]["best_auc"])
