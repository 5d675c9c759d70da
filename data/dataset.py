"""The format of a prepared data set: a folder of Parquet files with a manifest.

`data.prepare`, `data.convert` and `data.synthetic` write data sets, `data.index` adds the manifest to files
that other tools wrote, and `data.loader` reads them, from any pyarrow filesystem. The manifest `dataset.json`
is written last, under a temporary name, and renamed: a folder without it is not a data set.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

import pyarrow
from pyarrow import fs

from data.criteo import DENSE_NAMES, LABEL

MANIFEST_NAME: Final = "dataset.json"
FORMAT_VERSION: Final = 1
GCS_RETRY_S: Final = 30
"""Time limit of retries of requests to Google Cloud Storage, instead of pyarrow's 15 minutes."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One categorical feature and the table that its ids index."""

    name: str
    """Column name in the Parquet files. The column holds integers (one id a sample; int32, or int64 where ids
    are raw, if this project wrote it) or lists of them (multi-hot)."""
    rows: int
    """Number of rows a table for this feature needs: every id is in [0, rows). 0: ids are raw, any int64."""
    weights: str = ""
    """Name of a column of the same shape with a float32 weight for each id. The id's row is multiplied by it
    before the rows of a bag are summed. Empty: all weights are 1."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One Parquet file."""

    path: str
    """Path relative to the data set's folder, with forward slashes, e.g. `day=3/part-00007.parquet`."""
    day: int
    """Day, for splitting by time. Data without days is split into equal parts that count as days."""
    num_rows: int
    """Samples in the file."""
    row_groups: tuple[int, ...]
    """Rows in each Parquet row group, in order: a reader can plan without opening the file."""
    num_bytes: int
    """Size of the file."""
    sha256: str
    """Hex SHA-256 of the file's bytes."""


@dataclass(frozen=True, kw_only=True)
class DatasetManifest:
    """Contents of `dataset.json`."""

    features: tuple[Feature, ...]
    """Categorical features, in model order."""
    parts: tuple[Part, ...]
    """Files in time order."""
    dense: tuple[str, ...] = DENSE_NAMES
    """Names of the float32 columns, in model order; may be empty."""
    label: str = LABEL
    """Name of the column of labels: 0 or 1, as integers or floats, or false and true."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON form of the `data.schema.Schema` that made the data; empty if there was none."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How the data was made (the maker's configuration); e.g. `best_auc` of a planted teacher."""
    format_version: int = FORMAT_VERSION
    """Raised when a reader of this version could misread the folder."""

    def __post_init__(self) -> None:
        names = [self.label, *self.dense, *(feature.name for feature in self.features)]
        if len(names) == 1:
            raise ValueError(
                "the data set has a label but neither dense columns nor features; name some of either"
            )
        if "" in names:
            raise ValueError("a column of the data set has an empty name; rename it")
        weights = {feature.weights for feature in self.features if feature.weights}
        twice = [name for name, count in Counter([*names, *weights]).items() if count > 1]
        if twice:
            raise ValueError(
                f"column {twice[0]!r} of the data set has two roles; a column is the label, a dense column, "
                "a feature, or the weights of features"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Parquet columns that training needs: label, dense, ids, weights."""
        weights = dict.fromkeys(feature.weights for feature in self.features if feature.weights)
        return (self.label, *self.dense, *(feature.name for feature in self.features), *weights)

    @property
    def num_rows(self) -> int:
        """Samples in the whole data set."""
        return sum(part.num_rows for part in self.parts)

    @property
    def days(self) -> tuple[int, ...]:
        """The days present, ascending."""
        return tuple(sorted({part.day for part in self.parts}))

    def on_days(self, days: Sequence[int]) -> "DatasetManifest":
        """Restrict the data set to the parts of `days`, in time order.

        Raises:
            ValueError: a day is not in the data set.
        """
        missing = sorted(set(days) - set(self.days))
        if missing:
            raise ValueError(f"the data set has no day {missing}; it has days {list(self.days)}")
        parts = tuple(part for part in self.parts if part.day in set(days))
        return replace(self, parts=parts)

    def to_json(self) -> str:
        """Serialize to readable JSON; equal manifests give equal text.

        `label`, `schema` and `weights` are left out where they have their defaults, as in older manifests.
        """
        raw = asdict(self)
        if self.label == LABEL:
            del raw["label"]
        if not self.schema:
            del raw["schema"]
        for feature in raw["features"]:
            if not feature["weights"]:
                del feature["weights"]
        return json.dumps(raw, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "DatasetManifest":
        """Parse the JSON of a manifest.

        Raises:
            ValueError: the text is not a manifest, or has another format version.
        """
        try:
            raw = json.loads(text)
            version = raw["format_version"]
            if version != FORMAT_VERSION:
                raise ValueError(
                    f"data set format {version} is not the format {FORMAT_VERSION} that this version reads; "
                    "prepare the data again"
                )
            return cls(
                features=tuple(Feature(**feature) for feature in raw["features"]),
                parts=tuple(
                    Part(**{**part, "row_groups": tuple(part["row_groups"])}) for part in raw["parts"]
                ),
                dense=tuple(raw["dense"]),
                label=raw.get("label", LABEL),
                schema=raw.get("schema", {}),
                provenance=raw["provenance"],
            )
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{MANIFEST_NAME} cannot be read ({error!r}); prepare the data again") from error


def open_folder(uri: str) -> tuple[fs.FileSystem, str]:
    """Resolve a local path or any pyarrow filesystem URI to a filesystem and a path on it.

    Raises:
        ValueError: no filesystem supports this URI.
        OSError: the store cannot be reached.
    """
    if "://" not in uri:
        return fs.LocalFileSystem(), uri.rstrip("/") or "/"
    if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in uri:
        uri += f"{'&' if '?' in uri else '?'}retry_limit_seconds={GCS_RETRY_S}"
    with _explained(uri):
        filesystem, path = fs.FileSystem.from_uri(uri)
    return filesystem, path.rstrip("/") or "/"


def read_manifest(uri: str) -> DatasetManifest:
    """Read `dataset.json` of the data set at `uri`.

    Raises:
        ValueError: there is no data set, or its manifest is invalid.
        OSError: the manifest cannot be read, or the store cannot be reached.
    """
    filesystem, path = open_folder(uri)
    try:
        with _explained(uri), filesystem.open_input_stream(f"{path}/{MANIFEST_NAME}") as stream:
            text = stream.read()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{without_password(uri)} holds no {MANIFEST_NAME}: it is not a finished data set. Make one with "
            "`python -m data.convert` (from any tables), `python -m data.index` (of Parquet files with ids), "
            "`python -m data.prepare` (from raw Criteo files) or `python -m data.synthetic`"
        ) from error
    return DatasetManifest.from_json(text)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Add the data set's name and advice to errors of libraries."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except pyarrow.ArrowInvalid as error:
        raise ValueError(
            f"{without_password(uri)} cannot be opened ({error}); give a folder or a URI such as s3://BUCKET/FOLDER"
        ) from error
    except OSError as error:
        cause = " ".join(str(error).split()).partition(" error_info=")[0]
        raise OSError(
            f"{without_password(uri)} cannot be read ({cause}); check that it can be reached from here, and "
            "that this user may read it (for a store: its credentials)"
        ) from error


def without_password(uri: str) -> str:
    """Remove the user and password from a URI."""
    parts = urlsplit(uri)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if "://" in uri else uri
