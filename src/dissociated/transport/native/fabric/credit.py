"""How many bytes are under way on a connection over libfabric, which by itself takes whatever comes."""

from __future__ import annotations

from dissociated.transport.native.connection import MAX_IN_FLIGHT
from dissociated.transport.native.fabric.control import CONSUMED

#: Bytes that a message counts beside its own: libfabric may keep as many for one that nobody waits for.
_UNCLAIMED_OVERHEAD = 1 << 14
#: Bytes that a client has under way: libfabric takes in 32 messages whenever one is looked for, so a server notices one
#: who sends without end only when it has 32 times as much.
_CLIENT_WINDOW = 1 << 20
_REPORTS_PER_WINDOW = 8  # parts of what may be under way that are worth telling once they are consumed


class Credit:
    """What each side has sent and consumed: bytes, each message with its overhead."""

    def __init__(self, accepted: bool) -> None:
        self._sent = self._peer_consumed = 0
        self._consumed = self._reported = 0
        self._window = MAX_IN_FLIGHT if accepted else _CLIENT_WINDOW  # of ours
        self._peer_window = _CLIENT_WINDOW if accepted else MAX_IN_FLIGHT
        self._taken = self._largest = 0  # bytes that arrived, and the largest message of them, without its overhead

    # Ours

    @property
    def used(self) -> bool:
        """Whether anything was sent, or consumed."""
        return bool(self._sent or self._consumed)

    @property
    def spent(self) -> bool:
        """Whether the peer has consumed all that was sent."""
        return self._peer_consumed == self._sent

    def send(self, size: int) -> None:
        """A message of this size is under way."""
        self._sent += size + _UNCLAIMED_OVERHEAD

    def has_room(self, size: int) -> bool:
        """Whether a message of this size may be under way, too.

        What is in flight is what the peer has not consumed, or has not told yet, which can be a part of all.
        """
        in_flight = self._sent - self._peer_consumed
        return in_flight < self._window // 2 or in_flight + size <= self._window

    def receive_report(self, payload: bytes) -> bool | None:
        """The peer says how much it consumed. Whether that is more than before; None if it is more than it was sent."""
        (consumed,) = CONSUMED.unpack(payload)
        if consumed > self._sent:
            return None
        if consumed <= self._peer_consumed:
            return False  # one that was looked for may come after the next
        self._peer_consumed = consumed
        return True

    # The peer's

    @property
    def begun(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._taken)

    def arrive(self, size: int) -> bool:
        """A message of this size arrived. Whether the peer waits until what it sends is consumed, as it has to."""
        self._largest = max(self._largest, size)
        self._taken += size + _UNCLAIMED_OVERHEAD
        return self._taken - self._reported - self._largest <= self._peer_window * 5 // 4

    def consume(self, size: int) -> None:
        """A message of this size was consumed."""
        self._consumed += size + _UNCLAIMED_OVERHEAD

    def consume_all(self) -> None:
        """All that arrived was consumed."""
        self._consumed = self._taken

    @property
    def should_report(self) -> bool:
        """Whether so much was consumed that the peer should know."""
        return self._consumed - self._reported >= self._peer_window // _REPORTS_PER_WINDOW

    def report(self) -> bytes:
        """What tells the peer how much was consumed."""
        self._reported = self._consumed
        return self.last_report()

    def last_report(self) -> bytes:
        """The same as was told last."""
        return CONSUMED.pack(self._reported)
