"""The publisher's options for a live stream that is read once for all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dissociated.errors import OptionError

_MAX_LINGER = 1.0  # seconds; a consumer that lingers also delays frees, and so the source


@dataclass(frozen=True, kw_only=True)
class Live:
    """Options of a stream that is read once and shared by all clients. Raises OptionError for invalid values.

    Example:
        ```python
        import dissociated as dis

        server.publish("ticks", table.to_reader(), live=dis.Live(consumers=2, stall_timeout=5))
        ```
    """

    #: Whether clients that connect after the stream has begun "join" at its current position, or are sent away
    #: ("refuse").
    late: Literal["join", "refuse"] = "join"
    #: Number of clients that must be connected before the stream begins.
    consumers: int = 1
    #: What a slow client receives. With "block", every batch: the source waits for the client. With "drop_oldest", the
    #: source does not wait as long as batches are queued for the client: when memory is short, the oldest of these are
    #: dropped. With "latest", each read returns the newest batch, and older batches are dropped.
    policy: Literal["block", "drop_oldest", "latest"] = "block"
    #: Seconds for which a client that neither takes nor frees anything may delay all others before it is cut off.
    stall_timeout: float = 10.0
    #: Seconds between two sends of small batches to a client, so that several are sent in one call. With 0, a batch is
    #: sent at once if its connection is idle, and only batches that come faster than they can be sent share a call.
    linger: float = 0.0

    def __post_init__(self) -> None:
        if self.late not in ("join", "refuse"):
            raise OptionError(f'late is {self.late!r}; it must be "join" or "refuse"')
        if self.policy not in ("block", "drop_oldest", "latest"):
            raise OptionError(f'policy is {self.policy!r}; it must be "block", "drop_oldest" or "latest"')
        if self.consumers < 1:
            raise OptionError(f"consumers is {self.consumers!r}; a live stream begins with one consumer or more")
        if not self.stall_timeout > 0:
            raise OptionError(f"stall_timeout is {self.stall_timeout!r}; it must be a positive number of seconds")
        if not 0 <= self.linger <= _MAX_LINGER:
            raise OptionError(f"linger is {self.linger!r}; it must be a number of seconds from 0 to {_MAX_LINGER:g}")
