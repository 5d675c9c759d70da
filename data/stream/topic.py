"""Where a Kafka topic is, and how the client connects: the URI of a topic."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

FIXED: Final[Mapping[str, str | bool]] = {
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "auto.offset.reset": "error",
}
"""Properties that exact positions depend on."""
_FORM: Final = "kafka://HOST:PORT[,HOST:PORT...]/TOPIC[?PROPERTY=VALUE&...]"
_BROKER: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@]+):[0-9]+")
_TOPIC: Final = re.compile(r"/([a-zA-Z0-9._-]{1,249})")
_FILE: Final = "properties"
_SECRET: Final = re.compile(r"(password|passphrase|secret|key\.pem|oauthbearer\.config)$")
_PROPERTY: Final = re.compile(r"[a-z0-9]+(\.[a-z0-9_]+)+")


class TopicAddress(NamedTuple):
    """Where a topic is."""

    brokers: str
    """`HOST:PORT`, separated by commas."""
    topic: str
    properties: Mapping[str, str]
    """Of librdkafka; among them may be passwords."""

    @classmethod
    def of(cls, uri: str) -> "TopicAddress":
        """Parse a URI of the form `kafka://HOST:PORT[,HOST:PORT...]/TOPIC[?PROPERTY=VALUE&...]`.

        A property `properties` names a file with more of them, a line `PROPERTY=VALUE` each; secrets must be
        there.

        Raises:
            ValueError: it has another form, holds a secret, or sets a property that positions depend on. The
                message has no values of properties.
            OSError: the file cannot be read.
        """
        parts = urlsplit(uri)
        topic = _TOPIC.fullmatch(parts.path)
        brokers = parts.netloc.split(",")
        is_right = all(_BROKER.fullmatch(each) and int(each.rpartition(":")[2]) < 1 << 16 for each in brokers)
        if not topic or not is_right:
            raise ValueError(
                f"a topic of Kafka is given as {_FORM}; a user is the property sasl.username, and a password "
                f"sasl.password, in a file that the property {_FILE} names"
            )
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            pairs = [("", "")]
        file = dict(pairs).get(_FILE)
        pairs = [(name, value) for name, value in pairs if name != _FILE]
        if parts.fragment or not all(_PROPERTY.fullmatch(name) for name, _ in pairs):
            raise ValueError(
                f"what follows the Kafka topic {topic[1]} has the form ?PROPERTY=VALUE&PROPERTY=VALUE, with "
                "librdkafka's names, e.g. security.protocol; in values, write & as %26, # as %23, + as %2B "
                "and % as %25"
            )
        if secret := next((name for name, _ in pairs if _SECRET.search(name)), None):
            raise ValueError(
                f"the URI of a topic of Kafka is kept with a run, and {secret} is a secret: write it into a "
                f"file, a line {secret}=VALUE, and name that, as ?{_FILE}=/etc/kafka/client.properties"
            )
        if file is not None:
            pairs = [*_in_file(file), *pairs]
        properties = dict(pairs)
        if taken := sorted(properties.keys() & {*FIXED, "bootstrap.servers"}):
            raise ValueError(f"the trainer sets the property {taken[0]} of Kafka itself; leave it out")
        return cls(parts.netloc, topic[1], properties)


def _in_file(path: str) -> list[tuple[str, str]]:
    """The properties in a file; empty lines, and those that begin with `#`, are none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise OSError(f"the file of Kafka's properties {path} cannot be read ({error.strerror})") from error
    lines = [line.strip() for line in text.splitlines()]
    found = [line.partition("=") for line in lines if line and not line.startswith("#")]
    for number, (name, equals, _) in enumerate(found, start=1):
        if not equals or not _PROPERTY.fullmatch(name.strip()):
            raise ValueError(
                f"{path}, property {number}: not of the form PROPERTY=VALUE, with librdkafka's names"
            )
    return [(name.strip(), value.strip()) for name, _, value in found]
