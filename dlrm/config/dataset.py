"""The data set that a configuration names: its days, and the steps and samples of a run."""

from data.dataset import DatasetManifest, read_manifest
from dlrm.config.schema import Config, DataConfig


def open_manifest(data: DataConfig) -> DatasetManifest:
    """The manifest of the data; errors name the key that says where it is.

    Raises:
        ValueError: there is no data set.
        OSError: it cannot be read.
    """
    try:
        return read_manifest(data.uri)
    except ValueError as error:
        raise ValueError(f"data.uri: {error}") from error
    except OSError as error:
        raise OSError(f"data.uri: {error}") from error


def split_days(data: DataConfig, manifest: DatasetManifest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The days to train on and those to evaluate on.

    Raises:
        ValueError: none is left to train on.
    """
    test_days = data.test_days or manifest.days[-1:]
    train_days = data.train_days or tuple(day for day in manifest.days if day not in set(test_days))
    if not train_days:
        raise ValueError(
            f"{data.uri} has only day {list(manifest.days)}, which is the test day; prepare more days, "
            "or set data.train_days and data.test_days"
        )
    return train_days, test_days


def steps_in_epoch(data: DataConfig, manifest: DatasetManifest) -> int:
    """Batches that the training days give, as the loader counts them.

    Raises:
        ValueError: there are no days to train on.
    """
    train_days, _ = split_days(data, manifest)
    return manifest.on_days(train_days).num_rows // data.global_batch_size


def total_samples(config: Config, steps_in_epoch: int) -> int:
    """Samples that the whole run trains on, over all ranks."""
    steps = steps_in_epoch * config.train.epochs
    return min(steps, config.train.max_steps or steps) * config.data.global_batch_size
