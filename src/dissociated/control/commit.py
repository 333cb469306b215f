"""The options of a publication. The sender checks them before any data moves, and the receiver checks them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dissociated.datasets.base import check_name, is_plain_text
from dissociated.errors import OptionError

_MODES = ("overwrite", "append")
_MAX_TTL = 1e10  # seconds; the time of expiry is a date, and dates end with the year 9999


@dataclass(frozen=True)
class Publication:
    """The name, mode and options of a publication.

    Attributes:
        name: The name of the dataset.
        mode: `overwrite` to replace the dataset, or `append` to add rows to it.
        tags: The tags of the new version.
        ttl: The time to live in seconds; None if the version does not expire.

    Raises:
        OptionError: A value is invalid.
    """

    name: str
    mode: str = "overwrite"
    tags: Mapping[str, str] = field(default_factory=dict)
    ttl: float | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.mode not in _MODES:
            raise OptionError(f"the mode {self.mode!r} is neither overwrite nor append")
        if not isinstance(self.tags, Mapping) or not all(
            key and is_plain_text(key) and is_plain_text(value) for key, value in self.tags.items()
        ):
            raise OptionError(
                f"tags are texts that any program could write, each under a name that is not empty, not {self.tags!r}"
            )
        object.__setattr__(self, "tags", dict(self.tags))
        ttl = self.ttl
        if ttl is not None and not (_is_number(ttl) and 0 < ttl <= _MAX_TTL):
            raise OptionError(
                f"ttl is a positive number of seconds, {_MAX_TTL:.0f} at most, left out where there is no end, not "
                f"{ttl!r}"
            )

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Publication:
        """Return the publication in the JSON body of a client's request."""
        return cls(body["name"], body.get("mode", "overwrite"), body.get("tags") or {}, body.get("ttl"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
