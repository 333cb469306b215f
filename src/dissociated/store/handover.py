"""A Unix socket through which writers on the same host hand sealed memfds to a node, as descriptors (SCM_RIGHTS).

A message is one byte with one descriptor attached. The answer is JSON: {"segment": NAME} or {"error": SENTENCE}.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dissociated.base.fork import ProcessBound
from dissociated.base.limited_log import LimitedLog
from dissociated.errors import AccessDenied, DeadlineExceeded, DissociatedError, StoreError, TransportError
from dissociated.transport.framed.shm import peer_credentials

_log = logging.getLogger(__name__)

_SEND_TIMEOUT = 5.0  # seconds until a new connection has to send its message
_MAX_ANSWER = 1 << 16  # bytes
_MAX_SILENT = 64  # connections that have not sent anything yet
_ACCEPT_RETRY_DELAY = 0.1  # seconds
#: Seconds that `close` waits for a handover in progress, which may itself wait for a catalog.
STOP_TIMEOUT = 5.0


class _Waiting(NamedTuple):
    connection: socket.socket
    until: float


class HandoverListener(ProcessBound):
    """A listener at the socket `path`, which passes the received descriptors to `take`.

    A socket that exists at `path` is replaced. Only processes of this user and of root are accepted. `take` returns
    the name of the new segment; the listener closes the descriptor afterwards. Raises StoreError if it cannot listen.
    """

    def __init__(self, path: Path, take: Callable[[int], str]) -> None:
        self.path = path
        self._take = take
        self._log = LimitedLog(_log)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            if path.is_socket():
                path.unlink()  # left by a node that was killed: the store is locked by this one
            os.fchmod(self._socket.fileno(), 0o600)
            self._socket.bind(str(path))
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise StoreError(f"cannot listen at {str(path)!r}: {error.strerror or error}") from None
        self._listening = self._socket.fileno()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hand over", daemon=True)
        self._thread.start()
        self.bind_to_process()

    def _serve(self) -> None:
        """Serve all connections in one thread. A silent connection does not delay the others."""
        waiting: dict[int, _Waiting] = {}
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        try:
            while not self._closed.is_set() and self._poll_once(poll, waiting):
                pass
        finally:
            for peer in waiting.values():
                peer.connection.close()
            self._socket.close()

    def _poll_once(self, poll: select.poll, waiting: dict[int, _Waiting]) -> bool:
        """Answer the connections that have sent a message, close expired ones, and accept a new one.

        Return False when the listener is closed.
        """
        first = min((peer.until for peer in waiting.values()), default=None)
        ready = {fd for fd, _ in poll.poll(None if first is None else max(0.0, first - time.monotonic()) * 1000)}
        now = time.monotonic()
        for fd, peer in [*waiting.items()]:
            if fd in ready or peer.until <= now:
                poll.unregister(fd)
                del waiting[fd]
                with peer.connection, suppress(OSError):  # the peer may be gone
                    if fd in ready:
                        self._answer(peer.connection)
        return self._listening not in ready or self._accept(poll, waiting)

    def _accept(self, poll: select.poll, waiting: dict[int, _Waiting]) -> bool:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False  # closed
            self._closed.wait(_ACCEPT_RETRY_DELAY)  # until there are free descriptors
            return not self._closed.is_set()
        connection.settimeout(0)  # it is read only when data is there
        if self._refused(connection):
            connection.close()
            return True
        if len(waiting) == _MAX_SILENT:
            silent = next(iter(waiting))  # the oldest connection
            poll.unregister(silent)
            waiting.pop(silent).connection.close()
        poll.register(connection, select.POLLIN)
        waiting[connection.fileno()] = _Waiting(connection, time.monotonic() + _SEND_TIMEOUT)
        return True

    def _refused(self, connection: socket.socket) -> bool:
        _, user = peer_credentials(connection)
        if user in (os.geteuid(), 0):
            return False
        self._log.write(
            logging.WARNING,
            "handover refused: user=%d",
            user,
            event="not allowed",
            peer=f"user {user}",
        )
        with suppress(OSError):
            connection.send(_encode_answer(error=f"this node accepts no memory from user {user}"))
        return True

    def _answer(self, connection: socket.socket) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not data or _is_closed(connection):
                return  # making room for a writer that has given up would evict versions for nothing
            if not descriptors:
                answer = _encode_answer(error="no descriptor arrived; the node may have too many open")
            else:
                answer = _encode_answer(segment=self._take(descriptors[0]))
        except DissociatedError as error:
            answer = _encode_answer(error=str(error))
        except Exception:
            _log.exception("handover failed")
            answer = _encode_answer(error="the node failed: see its log")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        connection.send(answer)

    def close(self) -> None:
        """Stop listening, and wait for a handover in progress, but not for long."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes `poll`
        self._thread.join(STOP_TIMEOUT)
        self.path.unlink(missing_ok=True)
        self._log.close()

    def after_fork_in_child(self) -> None:
        self._socket.close()


def hand_over(path: str, descriptor: int, timeout: float) -> str:
    """Hand the memory of a descriptor to the node that listens at `path`.

    Args:
        path: The path of the node's socket.
        descriptor: A sealed memfd, which the caller keeps.
        timeout: Seconds to wait for each step.

    Returns:
        The name of the segment.

    Raises:
        TransportError: No node listens, or it ended before it answered.
        DeadlineExceeded: The node has not answered within `timeout`.
        AccessDenied: The node is that of another user.
        StoreError: The node has refused the memory; the message is the node's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            _, user = peer_credentials(connection)
            if user not in (os.geteuid(), 0):
                raise AccessDenied(f"the node at {path!r} runs as user {user}, which must not get this memory")
            socket.send_fds(connection, [b"\0"], [descriptor])
            answer = connection.recv(_MAX_ANSWER)
        except DissociatedError:  # before OSError, since some are of both types
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"the node at {path!r} did not answer for {timeout:g} s") from None
        except OSError as error:
            raise TransportError(f"cannot hand memory over at {path!r}: {error.strerror or error}") from None
    if not answer:
        raise TransportError(f"the node at {path!r} ended before it took the memory")
    reply = json.loads(answer)
    if "segment" not in reply:
        raise StoreError(reply["error"])
    return str(reply["segment"])


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the peer has closed a connection."""
    poll = select.poll()
    poll.register(connection, 0)  # the kernel reports POLLHUP in any case
    return bool(poll.poll(0))


def _encode_answer(**answer: str) -> bytes:
    return json.dumps(answer).encode()
