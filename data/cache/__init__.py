"""The multi-level cache of decoded row groups, for data sets on remote storage."""

from data.cache.source import CacheConfig, CachedSource

__all__ = ["CacheConfig", "CachedSource"]
