"""Which samples an experiment was measured with: part of its result's `config`, so that none are mixed."""

import hashlib

from data.dataset import MANIFEST_NAME, open_folder


def identity_of(dataset: str) -> str:
    """Names the samples of prepared data: its manifest holds a digest of every file.

    Args:
        dataset: folder or URI.

    Raises:
        OSError: it is not there.
    """
    filesystem, path = open_folder(dataset)
    with filesystem.open_input_stream(f"{path}/{MANIFEST_NAME}") as stream:
        return hashlib.sha256(stream.read()).hexdigest()[:24]
