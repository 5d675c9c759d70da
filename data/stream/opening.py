"""Opens a stream by its URI. Apart, as what reads records imports polars, which forks badly."""

from data.dataset import DatasetManifest
from data.stream.folder import FolderStream
from data.stream.source import StreamSource


def open_stream(uri: str, manifest: DatasetManifest, dataset: str, *, is_encoded: bool) -> StreamSource:
    """Open a stream: a folder that grows, a path or any pyarrow filesystem URI.

    Args:
        uri: of the stream.
        manifest: of the data set that says what the records are.
        dataset: its URI.
        is_encoded: whether records have the data set's own columns, with ids, instead of raw rows.

    Raises:
        ValueError: raw rows, of which the data set does not say how they are encoded.
    """
    return FolderStream(uri, manifest, dataset, is_encoded=is_encoded)
