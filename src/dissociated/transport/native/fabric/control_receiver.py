"""What the peer says beside the protocol, as it is received over libfabric."""

from __future__ import annotations

from typing import Any, Protocol

from dissociated.errors import RemoteProtocolError
from dissociated.transport.native.fabric.control import CONTROL, CONTROL_BUFFERS, CONTROL_SIZE, KIND_MASK, is_control
from dissociated.transport.native.fabric.endpoint import PeekedMessage
from dissociated.transport.native.fabric.operations import Completion, Done
from dissociated.transport.native.fabric.provider import ConnectionEndpoint

_MAX_PEEKS = 256  # messages that are taken before somebody else's turn
_MAX_CONTROL_WAITING = 128  # messages beside the protocol that may wait at once: libfabric keeps many more beside them


class ControlHandler(Protocol):
    """Whoever is told. It owns the receiver, which does not keep it."""

    def control_arrived(self, tag: int, data: bytes) -> None:
        """The peer says this."""

    def lose_by(self, error: int) -> None:
        """Receiving has failed."""

    def break_off(self, error: RemoteProtocolError) -> None:
        """The peer breaks the rules."""


class ControlReceiver:
    """Receives it, and finds what of it comes at once beyond the receives that there are."""

    def __init__(self, ffi: Any, endpoint: ConnectionEndpoint, peer: str) -> None:
        self._ffi, self._endpoint, self._peer = ffi, endpoint, peer
        self._waiting = 0  # messages in a row that nobody waited for

    def start(self, handler: ControlHandler) -> None:
        """Receive it from now on, for as long as the endpoint is open."""
        for _ in range(CONTROL_BUFFERS):
            self._receive(self._ffi.new(f"char[{CONTROL_SIZE}]"), handler)

    def peek(self, handler: ControlHandler) -> PeekedMessage | None:
        """A message that nobody waits for. What is said beside the protocol is none: whoever waits for it would starve.

        What is found of that is received.
        """
        for _ in range(_MAX_PEEKS):  # each look lets more arrive: a peer that sends without end shall not keep us here
            found = self._endpoint.peek()
            if found is None or not is_control(found.tag):
                self._waiting = 0 if found is None else self._waiting
                return found
            self._waiting += 1
            if self._waiting > _MAX_CONTROL_WAITING:
                handler.break_off(
                    RemoteProtocolError(f"{self._peer} says {self._waiting} things at once beside the protocol")
                )
            if found.length <= CONTROL_SIZE:
                memory = self._ffi.new(f"char[{CONTROL_SIZE}]")
                self._endpoint.claim(memory, self._done(memory, handler, again=False))
            else:
                self._endpoint.discard()
                handler.break_off(RemoteProtocolError(f"{self._peer} says {found.length} bytes beside the protocol"))
        return None

    def _receive(self, memory: Any, handler: ControlHandler) -> None:
        self._endpoint.receive_tagged(memory, CONTROL, KIND_MASK, self._done(memory, handler, again=True))

    def _done(self, memory: Any, handler: ControlHandler, again: bool) -> Done:
        """What to do once `memory` holds what the peer says; whether to receive into that `again`."""

        def done(completion: Completion) -> None:
            if completion.error:
                handler.lose_by(completion.error)
                return
            data = bytes(self._ffi.buffer(memory, completion.length))
            if again:
                self._receive(memory, handler)
            handler.control_arrived(completion.tag, data)

        return done
