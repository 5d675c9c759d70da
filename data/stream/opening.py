"""Opens a stream by its URI. Apart, as what reads records imports polars, which forks badly."""

from data.dataset import DatasetManifest
from data.stream.folder import FolderStream
from data.stream.source import StreamSource


def open_stream(uri: str, manifest: DatasetManifest, dataset: str) -> StreamSource:
    """Open a stream: a folder that grows, a path or any pyarrow filesystem URI.

    Args:
        uri: of the stream.
        manifest: of the data set that says what the records are.
        dataset: its URI.
    """
    return FolderStream(uri, manifest, dataset)
