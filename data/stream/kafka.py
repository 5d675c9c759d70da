"""A Kafka topic as a stream.

The position of a partition is an offset that the run's checkpoints hold. So there is no consumer group: ranks
divide the partitions among themselves, and nothing is committed to the brokers.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from data.dataset import DatasetManifest
from data.stream.backlog import shares_of
from data.stream.messages import MessageReader
from data.stream.source import Fetched, FoundUnit, Known, Place
from data.stream.topic import FIXED, TopicAddress

logger = logging.getLogger(__name__)

CONNECT_S: Final = 15.0
"""Time in which a broker must answer at the start."""
REFRESH_S: Final = 1.0
"""Age at which the ends of partitions are asked for again, and time limit of the answer."""
WARN_EVERY_S: Final = 60.0
POLL_S: Final = 0.01
POLL_MESSAGES: Final = 10_000
"""Messages taken from the client at once, at most; it refuses to give a million."""
BUFFER_CHUNKS: Final = 4
"""Messages held at most, in chunks of `fetch`: enough to choose the oldest among partitions."""
READ_OVER: Final = 10_000
"""Messages that are read and dropped rather than seek behind them, which drops all that the client holds."""


@dataclass
class _Partition:
    """A partition and what was read ahead of it."""

    number: int
    low: int = 0
    """First offset that the brokers hold."""
    high: int = 0
    """Offset after the last one."""
    asked: int = -1
    """Offset from which on records are wanted."""
    reached: int = 0
    """Offset from which on the client gives messages."""
    messages: deque[Message] = field(default_factory=deque)
    """Those in between."""

    def go_to(self, record: int) -> bool:
        """Want records from there on; whether the client must seek."""
        if record == self.asked:
            return False
        must_seek = not 0 <= self.asked < record <= self.reached + READ_OVER
        if must_seek:
            self.messages.clear()
            self.reached = record
        self.asked = record
        while self.messages and (self.messages[0].offset() or 0) < record:
            self.messages.popleft()
        return must_seek

    @property
    def end(self) -> int:
        """Offset after the last one, as far as known."""
        return max(self.high, self.reached)


class KafkaStream:
    """Messages of a topic; `MessageReader` says what they hold.

    Offsets without a message, which compaction and transactions leave, count as records that are left out.

    Args:
        uri: `kafka://HOST:PORT[,HOST:PORT...]/TOPIC[?PROPERTY=VALUE&...]`, with properties of librdkafka such
            as `security.protocol` and `sasl.username` (see `TopicAddress.of`); in values, `&`, `#`, `+` and
            `%` are written as `%26`, `%23`, `%2B` and `%25`. The client joins no group, but where brokers ask
            who may use one, `group.id` names it (default: cpr).
        manifest: of the data set.
        dataset: its URI.
        is_encoded: as for `MessageReader`.

    Raises:
        ValueError: the URI has another form, a property is wrong, there is no such topic, or the data set
            does not say how raw rows become its columns.
        ConnectionError: no broker answers.
    """

    def __init__(self, uri: str, manifest: DatasetManifest, dataset: str, *, is_encoded: bool) -> None:
        self._address = TopicAddress.of(uri)
        self.identity = f"kafka {self._address.topic}"
        self._reader = MessageReader(dataset, manifest, f"topic {self._address.topic}", is_encoded=is_encoded)
        self._newest_error = ""
        self._refreshed_s = self._warned_s = -np.inf
        self.is_quiet = False
        self._assigned: Collection[str] = ()
        self._consumer = self._connect()
        try:
            numbers = self._numbers()
            # of fixed width: names stay what they are when the topic gets more partitions
            self._by_name = {f"{number:05d}": _Partition(number) for number in numbers}
            self._by_number = {partition.number: partition for partition in self._by_name.values()}
            self._refresh()
        except BaseException:
            self.close()
            raise
        self.partitions = tuple(self._by_name)

    def fetch(self, places: Mapping[str, Place], at_most: int) -> Fetched | None:
        """Read messages of the partition whose next one is oldest; see `StreamSource.fetch`.

        While no broker can be reached it returns None, and logs that once a minute.

        Raises:
            ValueError: a partition ends before its place.
        """
        self._refresh()
        seeks = [self._by_name[name].go_to(place.record) for name, place in places.items()]
        if any(seeks) or self._assigned != places.keys():
            self._assign(places.keys())
        self._poll(places.keys(), BUFFER_CHUNKS * at_most)
        held = [(self._by_name[name].messages, name) for name in places]
        found = [(_arrived_s(messages[0]), name) for messages, name in held if messages]
        if not found:
            return None
        arrived_s, name = min(found)
        partition = self._by_name[name]
        messages = [partition.messages.popleft() for _ in range(min(at_most, len(partition.messages)))]
        records = np.array([message.offset() for message in messages], np.int64)
        partition.asked = end = int(records[-1]) + 1
        return Fetched(
            partition=name,
            begin=Place("", int(records[0])),
            end=end,
            checked=self._reader.read([message.value() for message in messages], records),
            arrived_s=arrived_s,
        )

    def waiting(self, partition: str, place: Place) -> int:
        """Offsets from `place` on that the brokers hold, up to a second ago."""
        self._refresh()
        of = self._by_name[partition]
        if place.record == of.asked and not of.messages and of.reached >= of.high:
            return 0  # nothing but marks of transactions
        return max(0, of.end - max(place.record, of.low))

    def shares(self, places: Mapping[str, Place], limit: int, *, newest: bool) -> dict[str, int]:
        """In proportion to what waits, as only reading tells times; see `StreamSource.shares`."""
        return shares_of(limit, {name: self.waiting(name, place) for name, place in places.items()})

    def skip(self, partition: str, place: Place, count: int) -> tuple[Place, int]:
        """The place after the next offsets; see `StreamSource.skip`."""
        of = self._by_name[partition]
        begin = max(place.record, of.low)
        end = min(begin + count, of.end)
        return (Place("", end), end - begin) if end > begin else (place, 0)

    def found(self, partition: str, since: int) -> Sequence[FoundUnit]:
        """None, as offsets grow, and brokers tell which ones they have deleted."""
        return ()

    def expect(self, partition: str, place: Place, known: Known) -> None:
        """Nothing: see `found`."""

    def where(self, partition: str, place: Place) -> str:
        """Partition and offset; see `StreamSource.where`."""
        return f"partition {int(partition)}, offset {place.record:,}"

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    def _connect(self) -> Consumer:
        def note(error: KafkaError) -> None:
            if error.code() != KafkaError._ALL_BROKERS_DOWN:  # which does not say why
                self._newest_error = error.str()

        settings = {"group.id": "cpr", "log_level": 0, **self._address.properties, **FIXED}
        try:
            return Consumer({**settings, "bootstrap.servers": self._address.brokers, "error_cb": note})
        except KafkaException as error:
            reason = error.args[0].str()
            raise ValueError(
                f"Kafka's client refuses the properties of the topic {self._address.topic}: {reason}; "
                "correct the URI"
            ) from error

    def _numbers(self) -> list[int]:
        """Numbers of the topic's partitions, ascending."""
        topic = self._address.topic
        try:
            found = self._consumer.list_topics(topic, timeout=CONNECT_S).topics[topic]
        except KafkaException as error:
            self._consumer.poll(0)  # calls `note`
            raise ConnectionError(
                f"no broker of the topic {topic} answers at {self._address.brokers} "
                f"({self._newest_error or error.args[0].str()}); check that Kafka runs, that it can be "
                "reached from here, and the security properties in the URI"
            ) from error
        if found.error is not None and found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise ValueError(
                f"there is no topic {topic} at {self._address.brokers}; create it, or correct the URI"
            )
        if found.error is not None or not found.partitions:
            reason = found.error.str() if found.error is not None else "it has no partitions"
            raise ValueError(f"the topic {topic} at {self._address.brokers} cannot be read: {reason}")
        return sorted(found.partitions)

    def _refresh(self) -> None:
        """Ask where partitions begin and end if that was long ago."""
        if time.monotonic() - self._refreshed_s >= REFRESH_S:
            self._ask()

    def _ask(self) -> bool:
        """Ask where partitions begin and end; whether all have answered."""
        of = [TopicPartition(self._address.topic, number) for number in self._by_number]
        answers: list[list[TopicPartition]] = []
        try:
            for of_all in (OFFSET_BEGINNING, OFFSET_END):
                for each in of:
                    each.offset = of_all
                answers.append(self._consumer.offsets_for_times(of, timeout=REFRESH_S))
        except KafkaException as error:
            self.is_quiet = False
            self._warn(error.args[0])
            return False
        finally:
            self._refreshed_s = time.monotonic()
        errors: list[KafkaError] = []
        for low, high in zip(*answers, strict=True):
            if low.error or high.error:
                errors.append(low.error or high.error)
            else:
                partition = self._by_number[low.partition]
                partition.low, partition.high = low.offset, high.offset
        self.is_quiet = not errors
        if errors:
            self._warn(errors[0])
        else:
            self._newest_error = ""
        return not errors

    def _assign(self, names: Collection[str]) -> None:
        """Have the client read partitions, each from where its messages end."""
        places = []
        for name in names:
            partition = self._by_name[name]
            if partition.reached < partition.low:
                if partition.reached:  # else the run begins with what there is
                    logger.warning(
                        "topic %s, partition %s: the brokers have deleted %s records that were not read; "
                        "goes on at offset %d. Train faster, or keep records longer (retention.ms)",
                        self._address.topic,
                        name,
                        f"{partition.low - partition.reached:,}",
                        partition.low,
                    )
                partition.reached = partition.low
            places.append(TopicPartition(self._address.topic, partition.number, partition.reached))
        self._consumer.assign(places)
        self._assigned = set(names)

    def _poll(self, names: Collection[str], at_most: int) -> None:
        """Take messages from the client, so that `at_most` are held."""
        room = at_most - sum(len(self._by_name[name].messages) for name in names)
        if room <= 0:
            return
        for message in self._consumer.consume(
            min(room, POLL_MESSAGES), timeout=0 if room < at_most else POLL_S
        ):
            error, number, offset = message.error(), message.partition(), message.offset()
            partition = self._by_number.get(-1 if number is None else number)
            if partition is None or offset is None:
                self._warn(error)
            elif error is None:
                partition.reached = offset + 1
                if offset >= partition.asked:
                    partition.messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                partition.reached = max(partition.reached, offset)
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION):
                self._reset(partition)
            else:
                self._warn(error)

    def _reset(self, partition: _Partition) -> None:
        """Seek again, as the brokers do not hold the offset that reading had reached."""
        if self._ask() and partition.reached > partition.high:
            raise ValueError(
                f"partition {partition.number} of the topic {self._address.topic} ends at offset "
                f"{partition.high}, but was read up to offset {partition.reached} before: has the topic been "
                "deleted and made anew? Begin a new run (dlrm.train --warm-start RUN_FOLDER: with the model "
                "of the old one)"
            )
        self._assigned = ()

    def _warn(self, error: KafkaError | None) -> None:
        """Log once a minute that brokers cannot be reached."""
        if time.monotonic() - self._warned_s >= WARN_EVERY_S:
            self._warned_s = time.monotonic()
            reason = self._newest_error or (error.str() if error else "the client does not say why")
            logger.warning(
                "topic %s at %s cannot be read, and is tried again: %s",
                self._address.topic,
                self._address.brokers,
                reason,
            )


def _arrived_s(message: Message) -> float:
    """Unix time of a message in seconds; the present if it has none."""
    kind, time_ms = message.timestamp()
    return time.time() if kind == TIMESTAMP_NOT_AVAILABLE else time_ms / 1000
