"""Batches of a prepared data set, shuffled in windows, made ahead, with an exact and resumable position."""

from data.loader.background import FeedClosedError
from data.loader.loader import DataLoader, LoaderConfig
from data.loader.source import ParquetSource, RowGroupSource

__all__ = ["DataLoader", "FeedClosedError", "LoaderConfig", "ParquetSource", "RowGroupSource"]
