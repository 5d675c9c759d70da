"""Records arrive at the rate that was asked for, with the columns of the data set, and each once."""

import time

import numpy as np
import polars as pl
import pytest

from data.dataset import read_manifest
from data.stream.kafka import KafkaStream
from data.stream.source import START, Place
from data.synthetic import SyntheticConfig
from experiments.streaming.arrivals import PARTITIONS, Arrivals
from tests.datasets import generate_few

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arrivals") / "data"
    config = SyntheticConfig(scale=1e-4, days=2, rows_per_day=400, rows_per_block=200, rows_per_file=200)
    return generate_few(config, folder) or folder


def labels_of(dataset):
    parts = read_manifest(str(dataset)).on_days([0]).parts
    return pl.concat([pl.read_parquet(dataset / part.path) for part in parts])["label"].to_list()


def test_files_have_the_rows_in_order_and_begin_anew_at_their_end(dataset, tmp_path):
    with Arrivals("folder", dataset, [0], tmp_path / "in") as arrivals:
        assert arrivals.uri == str(tmp_path / "in")
        assert arrivals.arrive(300) == 300
        assert arrivals.arrive(200) == 500
    files = [pl.read_parquet(path) for path in sorted((tmp_path / "in").iterdir())]
    assert [file.height for file in files] == [300, 200]
    labels = labels_of(dataset)
    assert pl.concat(files)["label"].to_list() == [*labels, *labels[:100]]
    assert tuple(files[0].columns) == read_manifest(str(dataset)).columns


def test_no_more_arrive_than_allowed(dataset, tmp_path):
    with Arrivals("folder", dataset, [0], tmp_path / "in", most=50) as arrivals:
        assert arrivals.arrive(40) == 40
        assert arrivals.arrive(40, per_s=1000.0) == 50
        time.sleep(0.6)
        assert arrivals.arrive() == 50


def test_records_arrive_at_a_rate_until_it_is_zero(dataset, tmp_path):
    with Arrivals("folder", dataset, [0], tmp_path / "in") as arrivals:
        began = time.monotonic()
        assert arrivals.arrive(per_s=500.0) == 0
        time.sleep(1.2)
        arrived = arrivals.arrive(per_s=0.0)
        assert 0 < arrived <= 500 * (time.monotonic() - began)
        time.sleep(0.6)
        assert arrivals.arrive() == arrived


def test_messages_are_rows_that_the_stream_reads(dataset, tmp_path):
    pytest.importorskip("confluent_kafka")
    manifest = read_manifest(str(dataset))
    with Arrivals("kafka", dataset, [0], tmp_path / "in") as arrivals:
        assert arrivals.arrive(100) == 100
        stream = KafkaStream(arrivals.uri, manifest, str(dataset), is_encoded=True)
        try:
            assert len(stream.partitions) == PARTITIONS
            places = dict.fromkeys(stream.partitions, START)
            found, deadline = {name: [] for name in stream.partitions}, time.monotonic() + 60
            while sum(map(len, found.values())) < 100:
                assert time.monotonic() < deadline
                fetched = stream.fetch(places, 100)
                if fetched is not None:
                    assert not fetched.checked.bad
                    assert abs(time.time() - fetched.arrived_s) < 60
                    places[fetched.partition] = Place("", fetched.end)
                    found[fetched.partition] += fetched.checked.rows.label.values.tolist()
        finally:
            stream.close()
    labels = np.array(labels_of(dataset)[:100])
    for number, each in enumerate(found.values()):
        assert each == labels[number::PARTITIONS].tolist()
