"""The configuration of data that streams in, and what it cannot be combined with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cpr.fields import check_fields

if TYPE_CHECKING:
    from dlrm.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Training on what arrives, instead of on days of `data.uri`, which then says what the columns are."""

    uri: str = ""
    """A folder in which files arrive, a path or a pyarrow URI, or `kafka://HOST:PORT/TOPIC`. Empty: train on
    the days of `data.uri`."""
    rows: Literal["raw", "encoded"] = "raw"
    """What a record is: a `raw` row, as `data.convert` or `data.prepare` have read to make the data set; or
    `encoded`, with the columns of the data set's own files."""
    wait_s: float = 1.0
    """Seconds after which a step begins although fewer records than `data.global_batch_size` have come."""
    end_after_s: float = 0.0
    """End training when nothing has come for this many seconds. 0: never."""
    backlog: int = 0
    """Records that may wait, over all ranks; of more, some are left out and counted. 0: any number; they stay
    in the folder or in Kafka."""
    keep: Literal["newest", "oldest", "sample"] = "newest"
    """With `backlog`: which of the waiting records are kept."""
    inject: float = 0.0
    """Share of each rank's records that is dealt among all ranks by chance in each step (data injection of
    ScaDLES), where labels are skewed between partitions and ranks select what they send (`comm.exchange`)."""

    def __post_init__(self) -> None:
        check_fields(self, "stream.")
        if not 0 <= self.inject <= 1:
            raise ValueError(f"stream.inject is a share of records, from 0 to 1, not {self.inject}")
        for name in ("wait_s", "end_after_s", "backlog"):
            if getattr(self, name) < 0:
                raise ValueError(f"stream.{name} must be at least 0, not {getattr(self, name)}")
        given = [name for name, value in vars(self).items() if value != getattr(StreamConfig, name)]
        if given and not self.uri:
            raise ValueError(
                f"stream.{' and stream.'.join(given)}: about data that streams in; set stream.uri, or leave "
                "it out"
            )
        if self.keep != StreamConfig.keep and not self.backlog:
            raise ValueError(
                "stream.keep says what is kept of more records than stream.backlog: set that, too"
            )


def check_stream(config: "Config") -> None:
    """Refuse what streams cannot be combined with.

    Raises:
        ValueError: names the key, and what to do.
    """
    train = config.train
    reasons = {
        "data.train_days": (bool(config.data.train_days), "are days of data.uri, which are not trained"),
        "data.order": (config.data.order == "seldp", "is about data that is there from the start"),
        "train.epochs": (train.epochs > 1, "are passes over data, of which there is one"),
        "train.evaluate_every_epochs": (train.evaluate_every_epochs > 0, "counts passes over data"),
        "train.batching": (train.batching == "dynamic", "sizes batches by speed, not by what has come"),
        "train.pipeline": (train.pipeline in {"waves", "delayed"}, "is made for batches of one size"),
        "train.measure_scaling": (train.measure_scaling, "times steps that wait for no data"),
        "comm.exchange": (config.comm.exchange == "selsync", "averages parameters whatever the sizes"),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            section, key = name.split(".")
            value = getattr(getattr(config, section), key)
            raise ValueError(f"{name}={value} {reason}; with stream.uri, leave it out")
    shares = {
        "checkpoint.target_pls": config.checkpoint.target_pls > 0,
        "recovery.max_pls": config.recovery.max_pls < 1,
    }
    for name, is_set in shares.items():
        if is_set and not train.max_steps:
            raise ValueError(
                f"{name} is a portion of the samples of the whole run, and nobody knows how many a stream "
                "will have: set train.max_steps"
            )
