"""A Kafka cluster of librdkafka's own, with which it is tested: brokers on loopback, in this process."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Producer

_PRODUCER, _TEXT_BYTES = 0, 512
_PLACE = ctypes.c_void_p


def _library() -> ctypes.CDLL:
    """The librdkafka that confluent_kafka has loaded; of its mock cluster Python can only start one."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ctypes.CDLL(next(line.split()[-1] for line in lines if "librdkafka" in line))


class KafkaCluster:
    """One broker, with topics that are made by `create`."""

    def __init__(self) -> None:
        self._library = library = _library()
        library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = _PLACE
        library.rd_kafka_mock_cluster_new.restype = _PLACE
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        conf = _PLACE(library.rd_kafka_conf_new())
        library.rd_kafka_conf_set(conf, b"log_level", b"0", text, _TEXT_BYTES)
        self._client = _PLACE(library.rd_kafka_new(_PRODUCER, conf, text, _TEXT_BYTES))
        assert self._client.value, text.value
        self._cluster = _PLACE(library.rd_kafka_mock_cluster_new(self._client, 1))
        self.address = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        self._producer = Producer({"bootstrap.servers": self.address, "log_level": 0, "linger.ms": 0})

    def uri(self, topic: str) -> str:
        return f"kafka://{self.address}/{topic}"

    def create(self, topic: str, num_partitions: int) -> None:
        self._ok(self._library.rd_kafka_mock_topic_create(self._cluster, topic.encode(), num_partitions, 1))

    def produce(
        self, topic: str, partition: int, values: Sequence[bytes | None], timestamp_ms: int = 1
    ) -> None:
        """Append messages, which get consecutive offsets."""
        for value in values:
            self._producer.produce(topic, value, partition=partition, timestamp=timestamp_ms)
        assert self._producer.flush(30) == 0

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """As retention does."""
        number, before = ctypes.c_int32(partition), ctypes.c_int64(offset)
        delete = self._library.rd_kafka_mock_partition_delete_records
        self._ok(delete(self._cluster, topic.encode(), number, before))

    @contextmanager
    def away(self) -> Iterator[None]:
        """The broker closes its connections, and takes none meanwhile."""
        self._ok(self._library.rd_kafka_mock_broker_set_down(self._cluster, 1))
        try:
            yield
        finally:
            self._ok(self._library.rd_kafka_mock_broker_set_up(self._cluster, 1))

    def close(self) -> None:
        del self._producer
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    @staticmethod
    def _ok(error: int) -> None:
        assert error == 0, f"the cluster of the test refuses a command: error {error}"
