"""Data that streams in, from a folder or Kafka: batches of what has come, with an exact position."""

from data.dataset import DatasetManifest
from data.stream.agreement import Rules
from data.stream.loader import StreamLoader
from data.stream.source import StreamSource

__all__ = ["Rules", "StreamLoader", "StreamSource", "open_stream"]


def open_stream(uri: str, manifest: DatasetManifest, dataset: str) -> StreamSource:
    """Open a stream.

    Args:
        uri: `kafka://HOST:PORT/TOPIC` (see `data.stream.kafka.KafkaStream`), or the path or URI of a folder.
        manifest: of the data set that describes the records.
        dataset: its URI.

    Raises:
        ValueError: the stream cannot be opened as the URI says; says what to change.
        OSError: the stream cannot be reached.
    """
    if not uri.startswith("kafka:"):
        from data.stream.folder import FolderStream  # noqa: PLC0415  # with polars, whose threads bar a fork

        return FolderStream(uri, manifest, dataset)
    try:
        from data.stream.kafka import KafkaStream  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise ValueError('streams of Kafka need confluent-kafka: pip install ".[kafka]"') from error
    return KafkaStream(uri, manifest, dataset)
