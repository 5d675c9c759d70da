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


def steps_in_epoch(config: Config, manifest: DatasetManifest) -> int | None:
    """Number of batches in one pass over the training days, as the loader counts them; None of a stream."""
    if config.stream.uri:
        return None
    train_days, _ = split_days(config, manifest)
    return manifest.on_days(train_days).num_rows // config.data.global_batch_size


def total_samples(config: Config, steps_in_epoch: int | None) -> int | None:
    """Samples that the whole run trains on, over all ranks; None: unknown, as they stream in."""
    most = config.train.max_steps
    steps = most if steps_in_epoch is None else steps_in_epoch * config.train.epochs
    return (min(steps, most or steps) * config.data.global_batch_size) or None


def best_auc(test: DatasetManifest) -> float | None:
    """AUC of the planted teacher on the test day, for synthetic data; else None."""
    days = test.provenance.get("days", {})
    if len(test.days) != 1 or str(test.days[0]) not in days:
        return None
    return float(days[str(test.days[0])]["best_auc"])
