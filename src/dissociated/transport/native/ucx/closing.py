"""Connections over UCX that are closed, and that UCX is not done with.

In error mode peer what was under way ends, with an error, once no other connection sends from the same memory: UCX has
one registration of it for all.

Where two processes of one host share memory (error mode none), each reads the other's bodies, and what it may fetch, by
itself, when it comes to it, and nothing can stop it. So what a peer may still read stays until it has noticed that the
connection is closed, or is gone. And what this process reads has to end before its worker does, or UCX aborts the
process.
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

_MAX_CLOSING = 64  # connections: each has a worker, up to 64 MB or one message, and a dataset that may be fetched from
_INTERVAL = 0.05  # seconds between two looks


class ClosingConnection:
    """What is left of a connection that is closed for whoever used it: its endpoint, and memory that is still in use.

    Owns both.
    """

    def __init__(self, peer: str, endpoint: UcxEndpoint, memory: list[object], devices: set[Device]) -> None:
        """`devices` are those that UCX may still copy to."""
        self._peer = peer
        self._endpoint = endpoint
        self._memory = memory
        self._devices = devices

    def advance(self) -> bool:
        """Let UCX work on it. Whether it is over, and everything has been given back.

        Raises DeviceError while nobody can tell what is under way on a device.
        """
        over = self._endpoint.advance_closing()
        if over:
            for device in self._devices:  # nothing is begun any more, and this is after all that was
                if (after := device.fence()) is not None:
                    after.synchronize()
            self._endpoint.destroy()
            self._memory.clear()
        return over

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._peer}>"


class ClosingConnections:
    """Those of this process, and a thread that looks after them while there are any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # what is collected within it may be a connection, which comes here to close
        self._connections: list[ClosingConnection] = []
        self._looking = False  # whether there is the thread

    def add(self, connection: ClosingConnection) -> None:
        """Own this connection from now on, and keep it until its peer needs it no more."""
        with self._lock:
            self._connections.append(connection)
        self._look_after()

    def check_room(self) -> None:
        """Raise TransportError where so many peers do not let go that there shall be no more."""
        self._look_after()
        if len(self._connections) >= _MAX_CLOSING:
            raise TransportError(
                f"{_MAX_CLOSING} connections over UCX are closed, and UCX is not done with them: with err_mode=none "
                "because their peers neither notice nor end, otherwise because others read the same and have stopped: "
                "continue or kill those processes"
            )

    def _look_after(self) -> None:
        """Start the thread where there is something to do. If none is to be had, the next connection tries it again."""
        if self._connections and not self._looking:
            try:
                start_thread(self._run, "ucx closing", "to give them back takes a thread")
            except TransportError as error:
                _log.warning("%d connections are closed and stay: %s", len(self._connections), error)

    def _run(self) -> None:
        with self._lock:
            if self._looking or not self._connections:  # two may have been started
                return
            self._looking = True
        while True:
            time.sleep(_INTERVAL)
            for connection in list(self._connections):
                try:
                    over = connection.advance()
                except Exception as error:
                    over = False  # kept: memory is never taken away
                    _log.info("%r: %s", connection, error)
                if over:
                    with self._lock:
                        self._connections.remove(connection)
                        if not self._connections:
                            self._looking = False
                            return


@once
def _closing_of(pid: int) -> ClosingConnections:
    """Those of this process: threads do not survive a fork, and connections are the parent's."""
    return ClosingConnections()


def closing_connections() -> ClosingConnections:
    return _closing_of(os.getpid())
