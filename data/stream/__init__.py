"""Data that streams in, from a folder or Kafka: batches of what has come, with an exact position."""

from data.stream.agreement import Rules
from data.stream.loader import StreamLoader
from data.stream.source import StreamSource

__all__ = ["Rules", "StreamLoader", "StreamSource"]
