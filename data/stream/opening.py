"""Opens a stream by its URI. Apart, as what reads records imports polars, which forks badly."""

from data.dataset import DatasetManifest
from data.stream.folder import FolderStream
from data.stream.source import StreamSource


def open_stream(uri: str, manifest: DatasetManifest, dataset: str, *, is_encoded: bool) -> StreamSource:
    """Open a stream: a folder that grows, a path or any pyarrow filesystem URI; or a topic of Kafka.

    Args:
        uri: of the stream; of a topic `kafka://HOST:PORT/TOPIC` (see `data.stream.kafka.KafkaStream`).
        manifest: of the data set that says what the records are.
        dataset: its URI.
        is_encoded: whether records have the data set's own columns, with ids, instead of raw rows.

    Raises:
        ValueError: the URI is wrong, a package is missing, or records are raw rows, of which the data set
            does not say how they are encoded.
        OSError: the stream cannot be reached.
    """
    if not uri.startswith("kafka:"):
        return FolderStream(uri, manifest, dataset, is_encoded=is_encoded)
    try:
        from data.stream.kafka import KafkaStream  # noqa: PLC0415  # an optional dependency
    except ImportError as error:
        raise ValueError('streams of Kafka need confluent-kafka: pip install ".[kafka]"') from error
    return KafkaStream(uri, manifest, dataset, is_encoded=is_encoded)
