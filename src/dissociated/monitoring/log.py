"""The log, one record a line, as text or as JSON.

The library logs by Python's `logging` and sets up nothing; a program may, with `configure` or in its own way. What a
record says beside its message stands in attributes of it, which are the FIELDS. Neither tickets nor tokens, nor what
they were made of, are in any record.
"""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any

from dissociated.errors import OptionError

#: What records may say beside their message: numbers, and words that hold no secret.
FIELDS = (
    "connection",
    "transport",
    "peer",
    "dataset",
    "change",
    "version",
    "rows",
    "why",
    "outcome",
    "seconds",
    "messages",
    "bytes",
    "method",
    "identity",
    "suppressed",
)
#: With these a peer could begin a line of its own, or write over others.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


def configure(format: str = "text", level: str = "info") -> None:
    """Write what is logged from `level` on to stderr, in place of what this wrote before.

    Raises OptionError for a format or level there is not.
    """
    if format not in LOG_FORMATS or level not in LOG_LEVELS:
        raise OptionError(
            f"a log is {' or '.join(LOG_FORMATS)}, from {', '.join(LOG_LEVELS)} on; not {format}, {level}"
        )
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger = logging.getLogger("dissociated")
    for before in [one for one in logger.handlers if isinstance(one.formatter, TextFormatter | JsonFormatter)]:
        logger.removeHandler(before)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def record_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the record says beside its message."""
    return {name: vars(record)[name] for name in FIELDS if name in vars(record)}


class TextFormatter(logging.Formatter):
    """2026-01-31T12:00:00.000Z INFO the message connection=1 transport=shm"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """The line, without what could begin another one."""
        fields = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in record_fields(record).items())
        return _UNPRINTABLE.sub(_escaped, " ".join((super().formatMessage(record), *fields)))


def _escaped(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


class JsonFormatter(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "message": ...}, the fields, and "exception" where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **record_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
