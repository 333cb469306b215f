"""What a writer says of a dataset: checked here, by who sends it before anything moves, and by who is asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dissociated.datasets.base import check_name
from dissociated.errors import OptionError

_MODES = ("overwrite", "append")


@dataclass(frozen=True)
class Publication:
    """A name, whether to replace what has it or to add to that, tags, and after how many seconds it is over.

    Raises OptionError for what makes no sense.
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
            isinstance(key, str) and key and isinstance(value, str) for key, value in self.tags.items()
        ):
            raise OptionError(f"tags are texts, each under a name that is not empty, not {self.tags!r}")
        ttl = self.ttl
        if ttl is not None and not (_is_number(ttl) and math.isfinite(ttl) and ttl > 0):
            raise OptionError(f"ttl is a positive number of seconds, left out where there is no end, not {ttl!r}")

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Publication:
        """What a client asks for, as JSON."""
        return cls(body["name"], body.get("mode", "overwrite"), body.get("tags") or {}, body.get("ttl"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
