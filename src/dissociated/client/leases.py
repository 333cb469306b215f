"""The leases of a client in a server's memory, and the thread that frees them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pyarrow as pa

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound
from dissociated.base.interrupts import interrupts_held
from dissociated.errors import DeadlineExceeded, DissociatedError
from dissociated.memory.device.base import Device
from dissociated.memory.leases import RETRY_INTERVAL, STILL_HELD, FreeQueue
from dissociated.protocol.message import Message
from dissociated.protocol.wire import encode_free
from dissociated.transport.base import Connection

_log = logging.getLogger(__name__)

_MAX_FREES = 1 << 12  # addresses, or numbers of messages, in one free_data message
_SEND_STEP = 0.5  # seconds after which a thread that sends frees looks whether it has to end


class ClientLeases(ProcessBound):
    """The leases of this client at one server, and the thread that frees them.

    It closes the connection when all addresses have been freed, and not before: disconnecting frees everything, and the
    mapped memory may change after that. If the server expects frees of messages, the addresses are numbers of messages.
    """

    def __init__(
        self,
        connection: Connection,
        free_data: int | None,
        timeout: float,
        on_freed: Callable[[Connection], None] | None = None,
    ) -> None:
        """Own the leases.

        Args:
            connection: The connection.
            free_data: The tag of messages that free addresses; None if the server takes none.
            timeout: Seconds for which the server may take nothing.
            on_freed: Takes the connection over after a whole stream of which everything was freed. None: it is closed.
        """
        self._on_freed = on_freed
        self._connection = connection
        self._free_data = free_data
        self._timeout = timeout
        self._returns = FreeQueue(connection)
        self._expected = 0  # number of addresses that must be passed to `lease` or `free`
        self._reason: str | None = None  # the error of the server that ended the stream
        self._settled = False  # whether addresses that were not passed by now never will be
        self._finished = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.bind_to_process()

    def expect(self, count: int) -> None:
        """Record that `count` addresses were delivered. Each must be passed to `lease` or `free` once.

        Raises:
            TransportError: There is no thread to free them. None of them may be passed on then.
        """
        if count and self._thread is None:
            self.start()
        self._expected += count

    def lease(self, memory: pa.Buffer, addresses: Sequence[int], device: Device | None = None) -> pa.Buffer:
        """Return `memory` as a buffer. When no array uses it any more, `addresses` are freed.

        Args:
            memory: The memory.
            addresses: The addresses in it.
            device: The device of the memory. Its addresses are freed only when its streams have finished reading, even
                if no array refers to the memory.
        """
        self.check_process()
        return self._returns.lease(memory, addresses, device)

    def free(self, addresses: Sequence[int]) -> None:
        """Free addresses that are not needed."""
        self.check_process()
        self._returns.put(addresses)

    def settle(self) -> None:
        """Record that no more addresses will be passed to `lease` or `free`, although more are expected."""
        self._settled = True
        self._returns.wake()

    def finish(self, stopped: bool, reason: str | None = None) -> None:
        """Record that no more addresses will be delivered.

        Args:
            stopped: Whether the server does not know that yet.
            reason: The reason to tell the server when the connection is closed.
        """
        with interrupts_held():  # otherwise the thread that frees leases might never end
            self._reason = reason
            if stopped:
                self._on_freed = None
                self._connection.interrupt(sending=False)
            self._finish()

    def _finish(self) -> None:
        self._finished = True
        if self._thread is not None:
            self._returns.wake()
        elif self._connection.address_space.close_devices():
            self._release(freed=True)
        else:
            self.start()

    def stop(self) -> None:
        """Make the thread end after it has freed the queued addresses: the process ends, and its connection with it."""
        self._stopped.set()
        if not self._connection.shares_memory:
            self._connection.interrupt()
        self._returns.wake()

    def start(self) -> None:
        """Start the thread before there are leases. Otherwise, the first of them starts it.

        Raises:
            TransportError: The system has no more threads.
        """
        thread = StreamThread(self, self._run, (), "give back")
        with interrupts_held():  # else a thread might be started and not recorded, or recorded and not started
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        returned = 0
        held_by_fork = False
        listening = self._free_data is not None
        while not ((self._stopped.is_set() and self._returns.empty) or self._is_over(returned)):
            addresses = self._returns.take(_MAX_FREES)
            returned += len(addresses)
            if self._is_over(returned) and not self._close_devices():
                break  # the server may free them after the last address
            if STILL_HELD in addresses:
                held_by_fork, addresses = True, [address for address in addresses if address != STILL_HELD]
            try:
                for first in range(0, len(addresses) if listening else 0, _MAX_FREES):
                    body = encode_free(addresses[first : first + _MAX_FREES])
                    self._send(Message(self._free_data, (body,)))
            except DissociatedError as error:
                # A server that is gone needs no frees. Mapped memory stays readable without it.
                _log.debug("sending frees failed: connection=%r error=%s", self._connection, error)
                listening = False
        if not self._stopped.is_set():
            self._close_devices()
        if self._stopped.is_set() and self._connection.shares_memory:
            _open_at_exit.append(self._connection)  # kept open, so that memory that is still held does not change
        else:
            self._connection.held_by_fork = held_by_fork
            self._release(freed=listening and returned == self._expected)

    def _send(self, message: Message) -> None:
        """Send a message, however long the server takes nothing: its source may pause. Later frees wait meanwhile.

        Raises:
            DeadlineExceeded: The server took nothing for the timeout, and the stream is over or this process ends.
            DissociatedError: Further errors of `Connection.send`.
        """
        messages = [message]
        # Only a connection that shares memory says by its backlog whether it has begun to send the message.
        repeats = self._connection.shares_memory
        step = min(self._timeout, _SEND_STEP) if repeats else self._timeout
        end = time.monotonic() + self._timeout
        while True:
            try:
                self._connection.send(messages, step)
                return
            except DeadlineExceeded:
                is_over = self._stopped.is_set() or (self._finished and time.monotonic() >= end)
                if is_over or not repeats:
                    raise
                _log.debug("server takes no frees, will retry: connection=%r", self._connection)
                if self._connection.backlog:
                    messages = []  # what has begun is sent first, and must not be sent twice

    def _release(self, freed: bool) -> None:
        if freed and self._on_freed is not None and not self._stopped.is_set():
            self._on_freed(self._connection)
        else:
            self._connection.close(self._reason)

    def _is_over(self, returned: int) -> bool:
        """Return whether all addresses have come back, given the number that has.

        After `settle`, addresses are not counted: Ctrl-C may come before an address is leased or freed, so that it
        never comes back.
        """
        return self._finished and (returned == self._expected or (self._settled and self._returns.idle))

    def _close_devices(self) -> bool:
        """Release the server's memory on devices when nothing reads it any more. Return False if stopped before."""
        while not self._connection.address_space.close_devices():
            if self._stopped.wait(RETRY_INTERVAL):
                return False
        return True


_open_at_exit: list[Connection] = []
