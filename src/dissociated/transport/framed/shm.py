"""shm:///PATH: frames over a Unix socket, and memory shared by descriptor (SCM_RIGHTS), within one host.

    listening     shm:///PATH?allow=USER,...    other users who may connect, by name or number
    connecting    shm:///PATH?allow=USER,...    other users whose servers, and whose sealed memory, are trusted
                  shm:///PATH?files=allow       also map such a server's files, although files cannot be sealed

These parameters apply to the side that uses them; locations that a server names have none. Root and this process's
own user are always allowed. If others are allowed, the socket is open to all users, and the kernel tells the server
which user connects. These users need access to the socket's directory.

A REGION frame announces a region. The region's descriptor travels with the frame's first byte:

    8 bytes  base, the first address of the region
    8 bytes  size in bytes
    8 bytes  backing: 0 file, 1 sealed memfd, 2 live memfd
"""

from __future__ import annotations

import array
import errno
import logging
import os
import pwd
import secrets
import select
import socket
import stat
import struct
import tempfile
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from dissociated.base.descriptors import locked
from dissociated.base.limited_log import LimitedLog
from dissociated.base.oserrors import socket_error
from dissociated.base.private import open_private_directory
from dissociated.errors import AccessDenied, NotPrivate, RemoteProtocolError, TransportError, UnsafeMemory, UriError
from dissociated.memory.private import keep_open
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing, is_sealed, map_received
from dissociated.protocol.close_reason import close_reason
from dissociated.transport.base import Connection, Listener, RemoteMemory, Transport
from dissociated.transport.framed.connection import SocketConnection, SocketListener, abort_frame
from dissociated.transport.framed.framing import PREAMBLE, FrameKind, encode_frame
from dissociated.transport.states import Call
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

_region = struct.Struct("<QQQ")
_credentials = struct.Struct("3i")  # struct ucred { pid, uid, gid }
_DESCRIPTOR = array.array("i").itemsize
_MAX_DESCRIPTORS = 253  # most descriptors that the kernel sends at once
_ANCILLARY_SIZE = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR)
_TRUNCATED = int(socket.MSG_CTRUNC)  # `&` with the member of the enumeration takes ten times as long
_PATH_MAX = 107  # struct sockaddr_un
_MAX_ADDRESS = (1 << 64) - 1
_CONNECT_RETRY_DELAY = 0.005  # seconds, before the next try to connect


class ShmConnection(SocketConnection, RemoteMemory):
    """A connection that sends framed messages over a Unix socket, and can share regions of memory."""

    shares_memory = True

    def __init__(self, sock: socket.socket, peer: str, accepted: bool, maps_files: bool = True) -> None:
        super().__init__(sock, peer, accepted)
        self._maps_files = maps_files
        self._descriptors: deque[int] = deque()  # received, not yet claimed by a REGION frame

    @property
    def memory(self) -> RemoteMemory:
        return self

    def share(self, descriptor: int, base: int, size: int, backing: int, timeout: float) -> None:
        self._lifecycle.take(Call.SEND)
        frame = encode_frame(FrameKind.REGION, 0, _region.pack(base, size, backing))
        if not self._preamble_sent:
            frame = PREAMBLE + frame
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            # The kernel sends so small a frame whole or not at all.
            while True:
                try:
                    self._socket.sendmsg([frame], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    break
                except BlockingIOError:
                    self._wait_writable(timeout)
        except OSError as error:
            raise socket_error(error, f"sharing memory with {self.peer}") from None
        self._preamble_sent = True

    def _tell(self, reason: str, later: bool) -> None:
        if not later:
            super()._tell(reason, later)
            return
        if self._cut_short and not self._unsent_parts:
            return  # the rest of the interrupted message is lost, so nothing may follow it
        if not self._preamble_sent:
            self._preamble_sent = True
            self._unsent_parts.append(PREAMBLE)
        self._unsent_parts.append(abort_frame(reason))
        # Try at once: the peer may free everything, and close, before this side receives and sends the rest.
        self._flush_unsent_parts(0, 0)

    def _wait_peer(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        self._flush_unsent_parts(0, seconds)
        # A peer that has only stopped sending may still have memory mapped. A Unix socket tells when it is closed.
        return self._hung_up(0, max(0.0, end - time.monotonic()))

    def _close_descriptors(self) -> None:
        super()._close_descriptors()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def after_fork_in_child(self) -> None:
        if self.address_space.has_live_memory and self._socket.fileno() >= 0:
            # The child's arrays keep this copy of the connection alive. As long as its socket is open, the server does
            # not reuse the memory.
            weakref.finalize(self, os.close, self._socket.detach()).atexit = False
        super().after_fork_in_child()

    def _read_into(self, memory: memoryview, timeout: float) -> int:
        if self._unsent_parts and self._accepted:  # the rest of a client's frees is sent by the thread that frees
            self._flush_unsent_parts(select.POLLIN, timeout)
        return super()._read_into(memory, timeout)

    def _flush_unsent_parts(self, events: int, timeout: float) -> None:
        """Send `_unsent_parts` until all are sent, one of the `events` occurs, or the peer closes the connection.

        Args:
            events: Events of `select.poll`.
            timeout: Seconds for which the peer may take nothing.
        """
        poll = select.poll()
        poll.register(self._socket, events | select.POLLOUT)
        while self._unsent_parts:
            happened = poll.poll(timeout * 1000)
            if not happened or not happened[0][1] & select.POLLOUT:
                return
            try:
                count = self._socket.send(self._unsent_parts[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            except OSError:
                self._unsent_parts.clear()  # the peer does not listen any more
                return
            unsent = memoryview(self._unsent_parts[0]).cast("B")[count:]
            self._unsent_parts[:1] = [unsent] if unsent else []
            if happened[0][1] != select.POLLOUT:
                return

    def _receive_into(self, memory: memoryview) -> int:
        if self._accepted:  # clients share no memory; the kernel drops a descriptor that a client sends
            return super()._receive_into(memory)
        count, ancillary, flags, _ = self._socket.recvmsg_into([memory], _ANCILLARY_SIZE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % _DESCRIPTOR
                self._descriptors.extend(array.array("i", data[:whole]))
        if flags & _TRUNCATED:
            raise TransportError(
                f"{self.peer} shared memory, but its descriptor was lost: this process has too many open "
                "(raise ulimit -n), or was sent too many at once"
            )
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise RemoteProtocolError(
                f"{self.peer} sends descriptors without the regions that they belong to", rule="region-descriptor"
            )
        return count

    def _region_shared(self, payload: bytes) -> None:
        if self._accepted:
            raise RemoteProtocolError("the client shared memory, which only servers do", rule="region-medium")
        if len(payload) != _region.size or not self._descriptors:
            raise RemoteProtocolError(
                "the peer announced a region of memory without its descriptor or its extent", rule="region-descriptor"
            )
        base, size, backing = _region.unpack(payload)
        descriptor = self._descriptors.popleft()
        try:
            if not 0 < base <= _MAX_ADDRESS + 1 - size:
                raise RemoteProtocolError(
                    f"the peer shared a region of {size} bytes at the invalid address {base:#x}", rule="region-base"
                )
            if backing == Backing.FILE and not self._maps_files and not is_sealed(descriptor):
                raise UnsafeMemory(
                    f"the {self.peer} runs as another user and shares a file, which that user could truncate while "
                    "it is mapped: read over another transport or with packed bodies, or use trusted_files=True"
                )
            memory = map_received(descriptor, size, backing)
            file = keep_open(descriptor) if self.address_space.keeps_files else None
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map the {size} bytes that {self.peer} shared: {error}") from error
        finally:
            os.close(descriptor)
        self.address_space.add(Region(base, memory, static=backing != Backing.LIVE, file=file))


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and of the user at the other end of a Unix socket, which the kernel vouches for."""
    pid, uid, _ = _credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size))
    return pid, uid


def _allowed(uri: Uri) -> frozenset[int]:
    """Return the ids of the users whom `uri` allows, of root, and of this user. Raise UriError for an unknown user."""
    return frozenset((os.geteuid(), 0, *map(_uid, filter(None, uri.parameters.get("allow", "").split(",")))))


def _uid(user: str) -> int:
    if user.isascii() and user.isdigit():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise UriError(f"this host has no user {user!r}: correct the list of allowed users") from None


class _ShmListener(SocketListener):
    def __init__(self, sock: socket.socket, uri: Uri, allowed: frozenset[int]) -> None:
        super().__init__(sock, uri)
        self._inode = os.stat(uri.path).st_ino
        self._allowed = allowed
        self._log = LimitedLog(_log)

    def _welcome(self, accepted: socket.socket, address: Any) -> Connection | None:
        pid, uid = peer_credentials(accepted)
        connection = ShmConnection(accepted, f"shm client {pid} of user {uid}", accepted=True)
        if uid in self._allowed:
            return connection
        self._log.write(
            logging.WARNING,
            "client refused, user not allowed: listener=%s client=%r",
            self.uri,
            connection,
            event="not allowed",
            peer=connection.peer,
        )
        denied = AccessDenied(f"this server does not allow user {uid}: its owner can add the user to `allow`")
        connection.close(close_reason(denied))
        return None

    def close(self) -> None:
        super().close()
        try:
            if os.stat(self.uri.path).st_ino == self._inode:
                os.unlink(self.uri.path)
        except OSError:
            pass  # the socket is removed already
        self._log.close()


class ShmTransport(Transport):
    """The transport `shm`. See the module."""

    connection_type = ShmConnection
    locality = 1

    def reachable(self, uri: Uri) -> bool:
        return os.path.exists(uri.path)

    def connect(self, uri: Uri, timeout: float) -> Connection:
        if not uri.path or uri.host or "\0" in uri.path:
            raise UriError(f"{uri} needs the path of a socket: shm:///PATH")
        where, allowed = f"shm server {uri.path}", _allowed(uri)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(sock, uri.path, timeout)
        except OSError as error:
            sock.close()
            if error.errno == errno.ENOENT:
                raise TransportError(f"the {where} does not exist: check that it runs on this host") from error
            raise socket_error(error, f"connecting to the {where}") from error
        user = peer_credentials(sock)[1]
        if user not in allowed:
            sock.close()
            raise TransportError(
                f"the {where} runs as another user, whose memory is not trusted: to trust it, use "
                f"trusted_users=[{user}]"
            )
        maps_files = user in (os.geteuid(), 0) or uri.parameters.get("files") == "allow"
        return ShmConnection(sock, where, accepted=False, maps_files=maps_files)

    def listen(self, uri: Uri) -> Listener:
        if uri.host or "\0" in uri.path:
            raise UriError(f"{uri} names a host; shm listens on a path: shm:///PATH, or shm: for one of its own")
        allowed = _allowed(uri)
        if uri.parameters.get("allow") and not uri.path:
            raise UriError(f"{uri} allows others, who cannot enter this user's own directory: shm:///PATH?allow=...")
        path = uri.path or str(runtime_directory() / f"{os.getpid()}-{secrets.token_hex(4)}.sock")
        if len(os.fsencode(path)) > _PATH_MAX:
            raise TransportError(
                f"the path {path!r} of a Unix socket is too long: at most {_PATH_MAX} bytes are possible"
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            directory = Path(path).parent
            # Locked, so that no other process takes this socket for stale before it listens.
            with locked(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)):
                for candidate in [path] if uri.path else map(str, directory.glob("*.sock")):
                    _remove_stale(candidate)
                os.fchmod(sock.fileno(), 0o600)  # bind creates the path with this mode
                sock.bind(path)
                if uri.parameters.get("allow"):
                    os.chmod(path, 0o666)  # a mode cannot list users, so `_welcome` checks them
                sock.listen(128)
        except OSError as error:
            sock.close()
            raise socket_error(error, f"listening on {path}") from error
        return _ShmListener(sock, Uri("shm", path=path), allowed)


def _connect(sock: socket.socket, path: str, timeout: float) -> None:
    """Connect, and retry while a busy server's queue is full: the kernel would wait forever or not at all."""
    deadline = time.monotonic() + timeout
    sock.setblocking(False)
    while True:
        try:
            return sock.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError from None
        time.sleep(_CONNECT_RETRY_DELAY)


def runtime_directory() -> Path:
    """Return the directory of this user's sockets: below XDG_RUNTIME_DIR, or else below the temporary directory.

    After `su`, XDG_RUNTIME_DIR may belong to another user, who could replace a directory in it. It is not used then.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and _is_private(base):
        directory = Path(base) / "dissociated"
    else:
        directory = Path(tempfile.gettempdir()) / f"dissociated-{os.geteuid()}"
    try:
        os.close(open_private_directory(directory, create=True))
    except NotPrivate as error:
        raise TransportError(str(error)) from None
    except OSError as error:
        raise TransportError(f"cannot make the directory {str(directory)!r} for sockets: {error.strerror}") from error
    return directory


def _is_private(directory: str) -> bool:
    try:
        os.close(open_private_directory(directory))
    except (NotPrivate, OSError):
        return False
    return True


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that died. Any other file stays, and `bind` fails for it."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.lstat(path).st_mode):
        return
    # A probe of another socket type never connects to a running server: that fails with EPROTOTYPE.
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError:
        pass  # the server is running, or the socket is inaccessible or already removed
    finally:
        probe.close()
