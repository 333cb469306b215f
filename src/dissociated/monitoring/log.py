"""The log, with one record in each line, as text or as JSON.

The library uses Python's `logging` and configures nothing. A program may call `configure`, or configure `logging`
itself. The attributes of a record that are in FIELDS have its data. No record contains tickets, tokens, or the secrets
that they are made from.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from dissociated.base.display import printable
from dissociated.errors import OptionError

#: The fields of records: numbers, and texts without secrets.
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
    "missed",
    "method",
    "identity",
    "suppressed",
)
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


def configure(format: str = "text", level: str = "info") -> None:
    """Write records of `level` and above to stderr. A second call replaces the first one's configuration.

    Raises:
        OptionError: The format or level is unknown.

    Example:
        ```python
        from dissociated.monitoring import log

        log.configure("json", "warning")
        ```
    """
    if format not in LOG_FORMATS or level not in LOG_LEVELS:
        raise OptionError(
            f"a log of format {format!r} and level {level!r} does not exist: the formats are "
            f"{', '.join(LOG_FORMATS)}, and the levels {', '.join(LOG_LEVELS)}"
        )
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logger = logging.getLogger("dissociated")
    for existing in [
        installed for installed in logger.handlers if isinstance(installed.formatter, TextFormatter | JsonFormatter)
    ]:
        logger.removeHandler(existing)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def record_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a record."""
    return {name: vars(record)[name] for name in FIELDS if name in vars(record)}


class TextFormatter(logging.Formatter):
    """A formatter for lines like `2026-01-31T12:00:00.000Z INFO the message connection=1 transport="shm"`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the name that logging requires
        """Return the line, with unprintable characters escaped."""
        fields = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in record_fields(record).items())
        # A peer could start a new line in the log with its name, or overwrite others in a terminal.
        return printable(" ".join((super().formatMessage(record), *fields)))


class JsonFormatter(logging.Formatter):
    """A formatter for lines of JSON: time, level, logger, message, the fields, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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
