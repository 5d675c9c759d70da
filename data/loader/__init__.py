"""Data loader of prepared data sets: shuffles in windows, prefetches, and resumes at an exact position."""

from data.loader.background import FeedClosedError
from data.loader.loader import DataLoader, LoaderConfig
from data.loader.source import ParquetSource, RowGroupSource, WithoutLabels

__all__ = [
    "DataLoader",
    "FeedClosedError",
    "LoaderConfig",
    "ParquetSource",
    "RowGroupSource",
    "WithoutLabels",
]
