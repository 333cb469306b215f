"""Closed UCX connections whose memory is still in use.

In error mode "peer", operations in progress end with an error, but only when no other connection sends from the same
memory, because UCX registers memory once for all connections.

In error mode "none", two processes of one host read each other's memory directly, at a time of their own, and nothing
can stop them. So memory that a peer may still read is kept until the peer has noticed that the connection is closed, or
has ended. And reads of this process must end before its worker is destroyed, or UCX aborts the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from dissociated.base.once import once
from dissociated.errors import TransportError
from dissociated.memory.device.base import Device
from dissociated.transport.native.threads import start_thread
from dissociated.transport.native.ucx.endpoint import UcxEndpoint

_log = logging.getLogger(__name__)

#: Limit of closing connections. Each holds a worker, up to 64 MB or one message, and a dataset that peers may fetch.
_MAX_CLOSING = 64
_INTERVAL = 0.05  # seconds between two checks


class ClosingConnection:
    """The endpoint of a connection that its user has closed, and the memory that is still in use. Owns both."""

    def __init__(self, peer: str, endpoint: UcxEndpoint, memory: list[object], devices: set[Device]) -> None:
        """Take over `endpoint` and `memory`.

        Args:
            peer: The name of the peer.
            endpoint: The endpoint, whose close has begun.
            memory: The objects whose memory UCX or the peer may still use.
            devices: The devices to which UCX may still copy.
        """
        self._peer = peer
        self._endpoint = endpoint
        self._memory = memory
        self._devices = devices

    def advance(self) -> bool:
        """Let UCX work on the close of the connection.

        Returns:
            Whether the connection is closed and all its resources are released.

        Raises:
            DeviceError: A device cannot tell whether copies to it have ended.
        """
        is_closed = self._endpoint.advance_closing()
        if is_closed:
            for device in self._devices:  # no copy begins any more, and the fence comes after all that have begun
                if (after := device.fence()) is not None:
                    after.synchronize()
            self._endpoint.destroy()
            self._memory.clear()
        return is_closed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._peer}>"


class ClosingConnections:
    """The closing connections of this process, and a thread that advances them while there are any."""

    def __init__(self) -> None:
        # Reentrant: garbage collection under the lock may close a connection, which calls `add`.
        self._lock = threading.RLock()
        self._connections: list[ClosingConnection] = []
        self._is_running = False  # whether the thread runs

    def add(self, connection: ClosingConnection) -> None:
        """Take ownership of `connection`, and keep it until neither UCX nor its peer uses its memory."""
        with self._lock:
            self._connections.append(connection)
        self._start_if_needed()

    def check_room(self) -> None:
        """Raise TransportError if there are too many closing connections to open another one."""
        self._start_if_needed()
        if len(self._connections) >= _MAX_CLOSING:
            raise TransportError(
                f"{_MAX_CLOSING} closed connections over UCX still use memory: with err_mode=none, their peers have "
                "not noticed the end; otherwise, other readers of the same memory have stopped; continue or kill "
                "those processes"
            )

    def _start_if_needed(self) -> None:
        """Start the thread if it is needed. If that fails, the next connection tries again."""
        if self._connections and not self._is_running:
            try:
                start_thread(self._run, "ucx closing")
            except TransportError as error:
                _log.warning("closing connections not released: count=%d error=%s", len(self._connections), error)

    def _run(self) -> None:
        with self._lock:
            if self._is_running or not self._connections:  # another thread may have been started at the same time
                return
            self._is_running = True
        while True:
            time.sleep(_INTERVAL)
            for connection in list(self._connections):
                try:
                    is_closed = connection.advance()
                except Exception as error:
                    is_closed = False  # the connection is kept, because its memory may still be in use
                    _log.info("connection closed with an error: connection=%r error=%s", connection, error)
                if is_closed:
                    with self._lock:
                        self._connections.remove(connection)
                        if not self._connections:
                            self._is_running = False
                            return


@once
def _closing_of(pid: int) -> ClosingConnections:
    """Return the closing connections of process `pid`: after a fork, threads and connections remain the parent's."""
    return ClosingConnections()


def closing_connections() -> ClosingConnections:
    """Return the connections of this process that are closing."""
    return _closing_of(os.getpid())
