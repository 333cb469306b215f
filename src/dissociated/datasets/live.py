"""What a publisher says of a live stream that is read once for all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dissociated.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Live:
    """How clients share a stream that is read once. Raises OptionError for values that make no sense."""

    #: What becomes of clients that come when it has begun: they "join" where it is, or are told to go: "refuse".
    late: Literal["join", "refuse"] = "join"
    #: How many clients must be there before it begins.
    consumers: int = 1
    #: Seconds for which a client that neither takes nor frees anything may hold up all others.
    stall_timeout: float = 10.0

    def __post_init__(self) -> None:
        if self.late not in ("join", "refuse"):
            raise OptionError(f'late is "join" or "refuse", not {self.late!r}')
        if self.consumers < 1:
            raise OptionError(f"a live stream begins with one consumer or more, not {self.consumers}")
        if not self.stall_timeout > 0:
            raise OptionError(f"stall_timeout is a positive number of seconds, not {self.stall_timeout}")
