"""Topics of Kafka, on librdkafka's own test cluster: every message once and in order, whatever happens."""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import confluent_kafka
import pytest

from data.loader.loader import LoaderConfig
from data.stream import Rules, StreamLoader
from data.stream.folder import FolderStream
from data.stream.kafka import KafkaStream
from data.stream.opening import open_stream
from data.stream.source import START, Fetched, Place
from data.stream.topic import TopicAddress
from tests.data.stream.kafka_cluster import KafkaCluster
from tests.data.stream.streams import MANIFEST

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[KafkaCluster]:
    made = KafkaCluster()
    yield made
    made.close()


@pytest.fixture
def topic(cluster, request) -> str:
    """Name of a topic of the test's own."""
    return re.sub("[^a-z0-9_]", ".", request.node.name)


@pytest.fixture
def open_topic(cluster, topic) -> Iterator[Callable[..., KafkaStream]]:
    streams: list[KafkaStream] = []

    def make(properties: str = "") -> KafkaStream:
        streams.append(KafkaStream(cluster.uri(topic) + properties, MANIFEST, "nowhere", is_encoded=True))
        return streams[-1]

    yield make
    for stream in streams:
        stream.close()


def message(number: int) -> bytes:
    return json.dumps({"label": number % 2, "price": number, "item": number}).encode()


def messages(begin: int, end: int) -> list[bytes]:
    return [message(number) for number in range(begin, end)]


def items(fetched: Fetched) -> list[int]:
    rows = fetched.checked.rows
    return [] if rows is None else rows.ids[0].values.tolist()


class Reading:
    """Fetches from places that it keeps, as a rank does."""

    def __init__(self, stream: KafkaStream, places: dict[str, Place] | None = None) -> None:
        self.stream = stream
        self.places = dict.fromkeys(stream.partitions, START) | (places or {})
        self.items: list[int] = []

    def fetch(self, at_most: int = 100) -> Fetched | None:
        fetched = self.stream.fetch(self.places, at_most)
        if fetched is not None:
            assert fetched.begin >= self.places[fetched.partition]
            assert (
                fetched.end - fetched.begin.record >= len(fetched.checked.records) > 0 or fetched.checked.bad
            )
            self.places[fetched.partition] = Place("", fetched.end)
            self.items += items(fetched)
        return fetched

    def fetch_some(self, at_most: int = 100) -> Fetched:
        deadline = time.monotonic() + PATIENCE_S
        while (fetched := self.fetch(at_most)) is None:
            assert time.monotonic() < deadline, "nothing comes"
        return fetched

    def fetch_items(self, num_items: int, at_most: int = 100) -> list[int]:
        while len(self.items) < num_items:
            self.fetch_some(at_most)
        return self.items

    @property
    def waiting(self) -> int:
        return sum(self.stream.waiting(name, place) for name, place in self.places.items())

    def drain(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.waiting:
            self.fetch()
            assert time.monotonic() < deadline, f"{self.waiting} messages never come"


def test_every_message_comes_once_and_in_order_over_restarts(cluster, topic, open_topic):
    cluster.create(topic, 3)
    for partition in range(3):
        cluster.produce(topic, partition, messages(1000 * partition, 1000 * partition + 100))
    places: dict[str, Place] = {}
    found: list[int] = []
    for at_most in (1, 7, 20):
        stream = open_topic()
        assert stream.partitions == ("00000", "00001", "00002")
        reading = Reading(stream, places)
        for _ in range(3):
            reading.fetch_some(at_most)
        places = reading.places
        found += reading.items
        stream.close()
    reading = Reading(open_topic(), places)
    reading.drain()
    found += reading.items
    assert sorted(found) == [1000 * partition + number for partition in range(3) for number in range(100)]
    for partition in range(3):
        own = [item for item in found if item // 1000 == partition]
        assert own == sorted(own)
    assert {place.record for place in reading.places.values()} == {100}


def test_messages_that_come_later_are_read_and_counted(cluster, topic, open_topic):
    cluster.create(topic, 2)
    stream = open_topic()
    reading = Reading(stream)
    assert reading.fetch() is None
    assert reading.waiting == 0
    cluster.produce(topic, 1, messages(0, 5))
    assert reading.fetch_items(5) == list(range(5))
    stream._refreshed_s = 0.0
    assert reading.waiting == 0


def test_places_may_go_back_and_ahead(cluster, topic, open_topic):
    cluster.create(topic, 1)
    cluster.produce(topic, 0, messages(0, 200))
    stream = open_topic()
    for begin in (0, 90, 20, 21, 150, 40, 199, 0):
        reading = Reading(stream, {"00000": Place("", begin)})
        assert reading.fetch_some(10).begin.record == begin
        assert reading.items == list(range(begin, min(begin + len(reading.items), 200)))
        assert 1 <= len(reading.items) <= 10


@pytest.mark.parametrize(("read_over", "num_seeks"), [(10, 2), (1000, 1)])
def test_a_place_far_ahead_is_sought(cluster, topic, open_topic, monkeypatch, read_over, num_seeks):
    assigned: list[list] = []

    class Noting(confluent_kafka.Consumer):
        def assign(self, places):
            assigned.append(places)
            super().assign(places)

    monkeypatch.setattr("data.stream.kafka.Consumer", Noting)
    monkeypatch.setattr("data.stream.kafka.READ_OVER", read_over)
    cluster.create(topic, 1)
    cluster.produce(topic, 0, messages(0, 100))
    reading = Reading(open_topic())
    reading.fetch_some(1)
    reading.places["00000"] = Place("", 80)
    fetched = reading.fetch_some(50)
    assert items(fetched) == list(range(80, fetched.end))
    assert len(assigned) == num_seeks


def test_the_partition_with_the_oldest_message_comes_first(cluster, topic, open_topic):
    cluster.create(topic, 2)
    cluster.produce(topic, 0, messages(0, 4), timestamp_ms=5000)
    cluster.produce(topic, 1, messages(10, 14), timestamp_ms=2000)
    cluster.produce(topic, 0, messages(4, 6), timestamp_ms=1000)
    reading = Reading(open_topic())
    first = reading.fetch_some(1)
    while any(partition.reached < partition.high for partition in reading.stream._by_name.values()):
        reading.stream._poll(reading.places.keys(), 100)
    chunks = [first, *(reading.fetch_some(2) for _ in range(5))]
    if first.partition == "00000":  # its answer came first
        del chunks[0]
    arrived = [(each.partition, each.arrived_s) for each in chunks]
    assert arrived[:2] == [("00001", 2.0), ("00001", 2.0)]
    assert {name for name, _ in arrived[-2:]} == {"00000"}


def test_bad_messages_keep_their_offsets(cluster, topic, open_topic):
    cluster.create(topic, 1)
    cluster.produce(topic, 0, [message(0), None, b"{", message(3), b'{"label": 1}'])
    reading = Reading(open_topic())
    bad: dict[int, str] = {}
    while reading.places["00000"].record < 5:
        bad |= reading.fetch_some().checked.bad
    assert reading.items == [0, 3]
    assert bad == {1: "no value", 2: "no JSON", 4: "price holds no number"}


@pytest.fixture
def compacted(monkeypatch) -> set[int]:
    """Offsets that compaction took away; a client sees no more of it than that they never come."""
    gone: set[int] = set()

    class Compacted(confluent_kafka.Consumer):
        def consume(self, *args, **kwargs):
            found = super().consume(*args, **kwargs)
            return [each for each in found if each.error() is not None or each.offset() not in gone]

    monkeypatch.setattr("data.stream.kafka.Consumer", Compacted)
    return gone


def test_offsets_without_messages_are_passed_over(cluster, topic, open_topic, compacted):
    cluster.create(topic, 1)
    cluster.produce(topic, 0, messages(0, 20))
    compacted |= {0, 1, 5, 6, 7, 18, 19}
    reading = Reading(open_topic())
    first = reading.fetch_some(5)
    assert first.begin.record == 2
    assert first.checked.records.tolist() == items(first)
    reading.drain()  # though nothing comes for the last two offsets
    assert reading.items == [number for number in range(20) if number not in compacted]
    assert reading.places["00000"].record == 18
    cluster.produce(topic, 0, messages(20, 21))
    assert reading.fetch_some().begin.record == 20


def test_a_new_run_begins_with_what_the_topic_holds(cluster, topic, open_topic, caplog):
    cluster.create(topic, 1)
    for begin in range(0, 30, 10):
        cluster.produce(topic, 0, messages(begin, begin + 10))
    cluster.delete_before(topic, 0, 10)
    reading = Reading(open_topic())
    assert reading.waiting == 20
    assert reading.stream.skip("00000", START, 3) == (Place("", 13), 3)
    assert reading.fetch_some(5).begin.record == 10
    reading.drain()
    assert reading.items == list(range(10, 30))
    assert not caplog.records


def test_deleted_messages_are_passed_over_and_logged(cluster, topic, open_topic, caplog):
    cluster.create(topic, 1)
    for begin in range(0, 30, 10):
        cluster.produce(topic, 0, messages(begin, begin + 10))
    cluster.delete_before(topic, 0, 20)
    reading = Reading(open_topic(), {"00000": Place("", 4)})
    assert reading.waiting == 10
    assert reading.fetch_some().begin.record == 20
    reading.drain()
    assert reading.items == list(range(20, 30))
    (record,) = caplog.records
    assert "have deleted 16 records that were not read; goes on at offset 20" in record.getMessage()


def test_messages_that_are_deleted_after_the_start(cluster, topic, open_topic, caplog, monkeypatch):
    monkeypatch.setattr("data.stream.kafka.REFRESH_S", 3600.0)  # so that only the broker's answer tells
    monkeypatch.setattr(KafkaStream, "_ask", lambda self, ask=KafkaStream._ask: ask_for(self, ask))
    cluster.create(topic, 1)
    for begin in range(0, 20, 10):
        cluster.produce(topic, 0, messages(begin, begin + 10))
    reading = Reading(open_topic(), {"00000": Place("", 4)})
    cluster.delete_before(topic, 0, 10)
    assert reading.fetch_some().begin.record == 10
    assert "have deleted 6 records" in caplog.text


def ask_for(stream: KafkaStream, ask: Callable[[KafkaStream], bool]) -> bool:
    """Ask with the usual time limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.stream.kafka.REFRESH_S", 5.0)
        return ask(stream)


def test_a_topic_that_was_made_anew_is_refused(cluster, topic, open_topic):
    cluster.create(topic, 1)
    cluster.produce(topic, 0, messages(0, 10))
    reading = Reading(open_topic(), {"00000": Place("", 50)})
    assert reading.waiting == 0
    with pytest.raises(ValueError, match=r"ends at offset 10, but was read up to offset 50.*--warm-start"):
        reading.fetch_some()


def test_while_the_broker_is_away_nothing_comes_and_that_is_logged_once(cluster, topic, open_topic, caplog):
    cluster.create(topic, 2)
    cluster.produce(topic, 0, messages(0, 10))
    reading = Reading(open_topic())
    assert reading.fetch_items(10) == list(range(10))
    with cluster.away():
        until = time.monotonic() + 4
        while time.monotonic() < until:
            assert reading.fetch() is None
            assert reading.waiting == 0
            time.sleep(0.05)
        (record,) = caplog.records
        assert f"topic {topic} at {cluster.address} cannot be read, and is tried" in record.getMessage()
        assert "refused" in record.getMessage()
    cluster.produce(topic, 0, messages(10, 20))
    cluster.produce(topic, 1, messages(20, 30))
    assert sorted(reading.fetch_items(30)) == list(range(30))


def test_skip_goes_to_the_end_at_most(cluster, topic, open_topic):
    cluster.create(topic, 1)
    cluster.produce(topic, 0, messages(0, 10))
    stream = open_topic()
    assert stream.skip("00000", Place("", 3), 4) == (Place("", 7), 4)
    assert stream.skip("00000", Place("", 8), 100) == (Place("", 10), 2)
    assert stream.skip("00000", Place("", 10), 1) == (Place("", 10), 0)


def test_an_unknown_topic_says_what_to_do(cluster):
    with pytest.raises(
        ValueError, match=r"no topic absent at 127\.0\.0\.1:\d+; create it, or correct the URI"
    ):
        KafkaStream(cluster.uri("absent"), MANIFEST, "nowhere", is_encoded=True)


SECRET = "hunter2"
LOGIN = "?security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN&sasl.username=u"


def with_password(folder, password):
    file = folder / "client.properties"
    file.write_text(f"sasl.password={password}\n")
    return f"{LOGIN}&properties={file}"


def test_no_broker_says_what_to_do_without_the_password(monkeypatch, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("data.stream.kafka.CONNECT_S", 1.0)
    uri = f"kafka://127.0.0.1:1/clicks{with_password(tmp_path, SECRET)}"
    with pytest.raises(
        ConnectionError, match=r"answers at 127\.0\.0\.1:1 .*refused.*check that Kafka runs"
    ) as raised:
        KafkaStream(uri, MANIFEST, "nowhere", is_encoded=True)
    assert SECRET not in str(raised.value) + str(raised.value.__cause__) + caplog.text


def test_properties_reach_the_client_and_the_identity_has_none(
    cluster, topic, open_topic, monkeypatch, tmp_path
):
    given: list[dict] = []

    class Noting(confluent_kafka.Consumer):
        def __init__(self, settings):
            given.append(settings)
            super().__init__({**settings, "security.protocol": "PLAINTEXT"})

    monkeypatch.setattr("data.stream.kafka.Consumer", Noting)
    cluster.create(topic, 1)
    stream = open_topic(with_password(tmp_path, "a&b+c%#") + "&client.id=a%26b%2Bc%25%23&group.id=readers")
    assert (given[0]["sasl.password"], given[0]["client.id"]) == ("a&b+c%#", "a&b+c%#")
    assert given[0]["group.id"] == "readers"
    assert stream.identity == f"kafka {topic}"


def test_properties_in_a_file(tmp_path):
    file = tmp_path / "client.properties"
    file.write_text("# of the cluster\nsasl.password = a&b=c#\n\nclient.id=other\n")
    uri = f"kafka://broker:9092/clicks?client.id=mine&properties={file}"
    assert TopicAddress.of(uri).properties == {"sasl.password": "a&b=c#", "client.id": "mine"}
    file.write_text(f"sasl.password: {SECRET}\n")
    with pytest.raises(ValueError, match="property 1: not of the form PROPERTY=VALUE") as caught:
        TopicAddress.of(uri)
    assert SECRET not in str(caught.value)
    with pytest.raises(OSError, match=r"cannot be read \(No such file"):
        TopicAddress.of(uri + ".not")


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("kafka://broker/clicks", "HOST:PORT"),
        ("kafka://broker:9092", "TOPIC"),
        ("kafka://broker:9092/", "TOPIC"),
        ("kafka://broker:9092/a/b", "TOPIC"),
        ("kafka:broker:9092/a", "HOST:PORT"),
        ("kafka://broker:9092,/clicks", "HOST:PORT"),
        (f"kafka://user:{SECRET}@broker:9092/clicks", "sasl.password"),
        (f"kafka://broker:9092/clicks?sasl.password=a&{SECRET}", "write & as %26"),
        (f"kafka://broker:9092/clicks?sasl.password=a&{SECRET}=b", "write & as %26"),
        (f"kafka://broker:9092/clicks?sasl.password=a#{SECRET}", "# as %23"),
        (
            f"kafka://broker:9092/clicks?sasl.password={SECRET}&client.id=a",
            "sasl.password is a secret: write it into a file, a line sasl.password=VALUE, and",
        ),
        (f"kafka://broker:9092/clicks?ssl.key.password={SECRET}", "ssl.key.password is a secret"),
        (
            f"kafka://broker:9092/clicks?sasl.pasword={SECRET}",
            'No such configuration property: "sasl.pasword"',
        ),
        (
            "kafka://broker:9092/clicks?auto.offset.reset=latest",
            "auto.offset.reset of Kafka itself; leave it out",
        ),
        ("kafka://broker:9092/clicks?bootstrap.servers=other:1", "leave it out"),
    ],
)
def test_a_wrong_uri_says_what_is_right_without_the_password(uri, advice):
    with pytest.raises(ValueError, match="Kafka") as raised:
        KafkaStream(uri, MANIFEST, "nowhere", is_encoded=True)
    assert advice in str(raised.value)
    assert SECRET not in str(raised.value) + str(raised.value.__cause__)


def test_the_scheme_chooses_the_stream(cluster, topic, tmp_path):
    cluster.create(topic, 1)
    stream = open_stream(cluster.uri(topic), MANIFEST, "nowhere", is_encoded=True)
    assert isinstance(stream, KafkaStream)
    stream.close()
    stream.close()  # which is safe
    assert isinstance(open_stream(str(tmp_path), MANIFEST, "nowhere", is_encoded=True), FolderStream)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    monkeypatch.delitem(sys.modules, "data.stream.kafka")
    with pytest.raises(ValueError, match=r'pip install "\.\[kafka\]"'):
        open_stream("kafka://broker:9092/clicks", MANIFEST, "nowhere", is_encoded=True)


class Ranks:
    """Ranks as threads, each with a loader of its own."""

    def __init__(self, uri: str, world_size: int, state: dict | None) -> None:
        self._barrier = threading.Barrier(world_size, timeout=PATIENCE_S)
        self._offers = [None] * world_size
        self.loaders = [
            StreamLoader(
                KafkaStream(uri, MANIFEST, "nowhere", is_encoded=True),
                MANIFEST,
                LoaderConfig(batch_size=8),
                Rules(global_batch=8 * world_size, wait_s=0.2, end_after_s=2.0),
                rank=rank,
                world_size=world_size,
                share=lambda offer, rank=rank: self._share(rank, offer),
            )
            for rank in range(world_size)
        ]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)

    def _share(self, rank: int, offer):
        self._offers[rank] = offer
        self._barrier.wait()
        offers = list(self._offers)
        self._barrier.wait()
        return offers

    def train(self, num_steps: int | None) -> tuple[list[int], dict]:
        """Train so many steps, save, and die in the step after that; or train to the end.

        Returns the ids that were trained before the save, and the position, which ranks must agree on.
        """
        ids: list[list[int]] = [[] for _ in self.loaders]
        states: list[str] = [""] * len(self.loaders)

        def run(rank: int) -> None:
            loader = self.loaders[rank]
            batches = iter(loader)
            for batch in islice(batches, num_steps):
                ids[rank] += batch.sparse.values().tolist()
            states[rank] = json.dumps(loader.state_dict())
            next(batches, None)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.loaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for loader in self.loaders:
            loader.close()
        assert states == [states[0]] * len(states)
        return [each for own in ids for each in own], json.loads(states[0])


def test_two_ranks_are_killed_and_one_goes_on_with_every_record_once(cluster, topic):
    cluster.create(topic, 3)
    cluster.produce(topic, 1, [None])
    for partition in range(3):
        cluster.produce(topic, partition, messages(1000 * partition, 1000 * partition + 60))
    uri = cluster.uri(topic)
    first, state = Ranks(uri, 2, None).train(5)
    assert 0 < len(first) <= 5 * 16
    assert state["stream"] == f"kafka {topic}"
    cluster.produce(topic, 2, messages(2060, 2080))
    middle, state = Ranks(uri, 2, state).train(2)
    rest, state = Ranks(uri, 1, state).train(None)
    expected = [1000 * partition + number for partition in range(3) for number in range(60)]
    assert sorted(first + middle + rest) == [*expected, *range(2060, 2080)]
    partitions = state["partitions"]
    assert {name: each[1] for name, each in partitions.items()} == {"00000": 60, "00001": 61, "00002": 80}
    assert [sum(each[at] for each in partitions.values()) for at in (3, 4, 5)] == [200, 0, 1]
