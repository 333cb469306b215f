"""An endpoint of libfabric for reliable datagrams (RDM): messages of two kinds, between any endpoints that know each
other's names, and one descriptor to wait on. Nothing here is thread-safe, and nothing knows what messages mean.
"""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

from dissociated.errors import TransportError
from dissociated.transport.native import _ofi as c
from dissociated.transport.native._ofi import Ofi, ofi
from dissociated.transport.native.connection import Waker
from dissociated.uri import ANY_INTERFACE

ANY_TAG = 2**64 - 1
_ANYBODY = 2**64 - 1
_AT_ONCE = 64  # completions that are read at once
_EAGER = 1 << 13  # bytes up to which messages are always copied on the way, and need not be registered
_RXM_EAGER = 1 << 14
_ALL = 3  # objects that an endpoint consists of
_DRAINED = 1 << 16  # messages that are thrown away, at most
_ENOUGH = 64  # messages that are thrown away before the peer is kept from sending more
_ANSWERED = 16  # reads of the queue after which a provider has answered, behind what else was done
_CUT = 0.25  # seconds for what is cut off to end
_CONTEXT = 8  # pointers that a provider may keep in the context of an operation (struct fi_context2)
#: An untagged message may have this many bytes: what is left in a buffer for many of them must take one.
MAX_UNTAGGED = 1 << 16
#: Operations that an endpoint has under way in each direction, at most; libfabric's default takes 40 MB for each.
QUEUE = 256


class Completion(NamedTuple):
    """How an operation ended. `error` is 0 or an errno; `pointer` is where an untagged message lies."""

    error: int
    flags: int
    length: int
    pointer: Any
    tag: int


Done = Callable[[Completion], None]

#: The name of an endpoint: family, port, address, and what else there is.
_sockaddr = {socket.AF_INET: struct.Struct("=H2s4s8s"), socket.AF_INET6: struct.Struct("=H2s4x16s4s")}


def host_and_port(name: bytes) -> tuple[str, int]:
    """The host and port in the name of an endpoint, which is a socket address. Raises ValueError, struct.error."""
    family = socket.AddressFamily(int.from_bytes(name[:2], sys.byteorder))
    _, port, host, _ = _layout(family).unpack_from(name)
    return socket.inet_ntop(family, host), int.from_bytes(port, "big")


def reachable(names: bytes, host: str) -> bytes:
    """The names of endpoints that listen on all interfaces, or on one, as others reach them at `host`.

    Raises ValueError, OSError, struct.error.
    """
    family = socket.AddressFamily(int.from_bytes(names[:2], sys.byteorder))
    layout, here = _layout(family), socket.inet_pton(family, host.partition("%")[0])
    return b"".join(
        layout.pack(number, port, named if any(named) else here, rest)
        for number, port, named, rest in layout.iter_unpack(names)
    )


def _layout(family: socket.AddressFamily) -> struct.Struct:
    if family not in _sockaddr:
        raise ValueError(f"{family.name} is no family of internet addresses")
    return _sockaddr[family]


def _connections() -> Iterator[socket.socket]:
    """The TCP connections of this process, whoever has made them; each is a duplicate."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                found = socket.socket(fileno=os.dup(int(descriptor)))
                if found.family in _sockaddr and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()


class _Operation(NamedTuple):
    context: Any
    done: Done
    keep: Any  # memory that must stay
    many: bool  # whether it ends more than once: a buffer for untagged messages
    registered: Sequence[Any]  # memory, for as long as it lasts
    fetches: bool  # whether the peer's memory is being read


class Found(NamedTuple):
    """A tagged message that has been peeked at, and must now be claimed or discarded."""

    tag: int
    length: int
    context: Any


class Domain:
    """A fabric and a domain in it, with which memory is registered. The last endpoint that shares it closes it."""

    def __init__(self, used: Ofi, info: Any) -> None:
        self._ffi = used.ffi
        self._lock = threading.Lock()
        self._users = 0
        null, doing = used.ffi.NULL, "opening a domain"
        fabric, domain = used.ffi.new("struct fid_fabric **"), used.ffi.new("struct fid_domain **")
        used.check(used.lib.fi_fabric(info.fabric_attr, fabric, null), doing)
        self.fabric = fabric[0]
        code = self.fabric.ops.domain(self.fabric, info, domain, null)
        if code < 0:
            self.fabric.fid.ops.close(used.ffi.addressof(self.fabric.fid))
        used.check(code, doing)
        self.domain = domain[0]
        self._keys = count(1)
        self._used = used

    def enter(self) -> None:
        """Another endpoint shares it."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """An endpoint is closed."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for one in (self.domain, self.fabric):
                    one.fid.ops.close(self._ffi.addressof(one.fid))

    def register(self, memory: Any, access: int) -> Any:
        """Let libfabric use memory, or peers, until what is returned is given to `unregister`."""
        made, null = self._ffi.new("struct fid_mr **"), self._ffi.NULL
        fid = self._ffi.addressof(self.domain.fid)
        code = self.domain.mr.reg(fid, memory, len(memory), access, 0, next(self._keys), 0, made, null)
        self._used.check(code, "registering memory")
        return made[0]

    def unregister(self, registered: Any) -> None:
        """Peers, and libfabric, have no more access."""
        registered.fid.ops.close(self._ffi.addressof(registered.fid))


class Endpoint:
    """Bound to `node` and `service`, which are a host and a port where the provider has such; owns all that it opens.

    With `rma` it can read from memory that others have registered; endpoints that share a `domain` are reached by
    whoever has a key of it. Raises TransportError where libfabric refuses.
    """

    #: How many there are in one: what is sent in one comes in the order of libfabric.
    lanes = 1

    def __init__(
        self, provider: str, node: str, service: str | None, rma: bool = False, domain: Domain | None = None
    ) -> None:
        self.ofi = ofi()
        self._ffi, self._lib = self.ofi.ffi, self.ofi.lib
        self._operations: dict[int, _Operation] = {}
        self._entered = self._enabled = self._closing = False
        self._opened: list[Any] = []  # what has to be closed, last first
        self._count = 0  # of operations that have ended, but for looking
        self._peeking: Any = None
        self._found: Found | None = None
        self._provider, self._rma = provider, rma
        self._known: bytes | None = None  # the name of the endpoint that was inserted last
        info = self._info(node, service, c.SOURCE, f"opening {provider} at {node}:{service or '*'}")
        try:
            self.iov_limit = min(info.tx_attr.iov_limit, 4)
            self.max_message: int = info.ep_attr.max_msg_size
            self.protocol = f"{info.ep_attr.protocol}.{info.ep_attr.protocol_version}"
            #: Messages up to this many bytes arrive whole; larger ones are fetched from the peer when they are claimed.
            self.whole: int = self.max_message
            if self._provider.endswith("ofi_rxm"):
                self.whole = _RXM_EAGER
                # Otherwise it registers memory itself, and where a transfer is cut off never lets go of it.
                info.domain_attr.mr_mode |= c.MR_LOCAL
            self._local = bool(info.domain_attr.mr_mode & c.MR_LOCAL)
            #: Whether addresses for reads are those of the server's process, rather than offsets.
            self.virtual_addresses = bool(info.domain_attr.mr_mode & c.MR_VIRT_ADDR)
            new = self._ffi.new
            self._entries = new(f"struct fi_cq_tagged_entry[{_AT_ONCE}]")
            self._error = new("struct fi_cq_err_entry *")
            self._tagged = new("struct fi_msg_tagged *")
            self._tagged.addr, self._tagged.ignore = _ANYBODY, ANY_TAG
            self._one = new("struct iovec *")
            self._tagged.msg_iov = self._one
            self._iov = new(f"struct iovec[{self.iov_limit}]")
            self._descriptors = new(f"void *[{self.iov_limit}]")
            self._open(info, domain)
        except BaseException:
            Endpoint.close(self)
            raise
        finally:
            self._lib.fi_freeinfo(info)

    def _info(self, node: str, service: str | None, flags: int, doing: str) -> Any:
        ffi, lib = self._ffi, self._lib
        hints = lib.fi_dupinfo(ffi.NULL)
        hints.caps = c.MSG | c.TAGGED | (c.RMA if self._rma else 0)
        hints.ep_attr.type = c.EP_RDM
        hints.fabric_attr.prov_name = lib.strdup(self._provider.encode())
        hints.domain_attr.threading = c.THREAD_SAFE if self._rma else c.THREAD_DOMAIN  # which may be shared
        hints.domain_attr.mr_mode = c.MR_LOCAL | c.MR_VIRT_ADDR | c.MR_PROV_KEY | c.MR_ALLOCATED
        hints.tx_attr.size = hints.rx_attr.size = QUEUE
        found = ffi.new("struct fi_info **")
        where = ffi.NULL if service is None else service.encode()
        code = lib.fi_getinfo(c.API, node.encode(), where, flags, hints, found)
        lib.fi_freeinfo(hints)
        self.ofi.check(code, doing)
        return found[0]

    def _open(self, info: Any, shared: Domain | None) -> None:
        ffi, check, null = self._ffi, self.ofi.check, self._ffi.NULL
        doing = f"opening {self._provider}"

        def opened(kind: str, call: Callable[..., int], *arguments: Any) -> Any:
            made = ffi.new(f"struct {kind} **")
            check(call(*arguments, made, null), doing)
            self._opened.append(made[0])
            return made[0]

        self.domain = shared or Domain(self.ofi, info)
        self.domain.enter()
        self._entered = True
        self._fabric, domain = self.domain.fabric, self.domain.domain
        vector = ffi.new("struct fi_av_attr *")
        vector.type = c.AV_TABLE
        self._vector = opened("fid_av", domain.ops.av_open, domain, vector)
        queue = ffi.new("struct fi_cq_attr *")
        queue.format, queue.wait_obj, queue.size = c.CQ_FORMAT_TAGGED, c.WAIT_FD, 4 * QUEUE
        self._queue = opened("fid_cq", domain.ops.cq_open, domain, queue)
        self._endpoint = opened("fid_ep", domain.ops.endpoint, domain, info)
        self._fid = ffi.addressof(self._endpoint.fid)
        for other, flags in ((self._queue, c.SEND | c.RECV), (self._vector, 0)):
            check(self._endpoint.fid.ops.bind(self._fid, ffi.addressof(other.fid), flags), doing)
        least = ffi.new("size_t *", MAX_UNTAGGED)
        check(self._endpoint.ops.setopt(self._fid, 0, c.OPT_MIN_MULTI_RECV, least, ffi.sizeof("size_t")), doing)
        check(self._endpoint.fid.ops.control(self._fid, c.ENABLE, null), doing)
        self._enabled = True
        queue_fid = ffi.addressof(self._queue.fid)
        descriptor = ffi.new("int *")
        check(self._queue.fid.ops.control(queue_fid, c.GETWAIT, descriptor), doing)
        self._wakes = [int(descriptor[0])]
        self._waited_for = ffi.new("struct fid *[1]", [queue_fid])

    # Who is who

    @property
    def name(self) -> bytes:
        """What others insert to reach this endpoint."""
        ffi = self._ffi
        length, memory = ffi.new("size_t *", 256), ffi.new("char[256]")
        self.ofi.check(self._endpoint.cm.getname(self._fid, memory, length), "asking for an endpoint's name")
        return bytes(ffi.buffer(memory, length[0]))

    def find(self, node: str, service: str) -> bytes:
        """The name of the endpoint that is bound there."""
        info = self._info(node, service, 0, f"looking for {node}:{service}")
        try:
            return bytes(self._ffi.buffer(info.dest_addr, info.dest_addrlen))
        finally:
            self._lib.fi_freeinfo(info)

    def insert(self, name: bytes) -> int:
        """Make an endpoint known. Its number, for sending to it. Raises TransportError for what is no name."""
        number = self._ffi.new("fi_addr_t *")
        padded = name.ljust(256, b"\0")
        if self._vector.ops.insert(self._vector, self._ffi.from_buffer(padded), 1, number, 0, self._ffi.NULL) != 1:
            raise TransportError(f"libfabric {self.ofi.version} knows no endpoint {name.hex()}")
        self._known = name
        return int(number[0])

    def remove(self, number: int) -> None:
        """Forget an endpoint."""
        self._vector.ops.remove(self._vector, self._ffi.new("fi_addr_t *", number), 1, 0)

    # Messages

    @property
    def ended(self) -> int:
        """How many operations have ended, but for looking."""
        return self._count

    @property
    def found(self) -> Found | None:
        """What was found and is neither claimed nor discarded."""
        return self._found

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], done: Done) -> bool:
        """Begin to send; `pieces` are at most `iov_limit` buffers (cffi's). False if that must be tried again later.

        They must stay as they are until `done`, and are kept till then. Raises TransportError.
        """
        assert len(pieces) <= self.iov_limit  # libfabric does not check that, and crashes
        registered = (
            [self._register(piece) for piece in pieces] if self._local and sum(map(len, pieces)) > _EAGER else ()
        )
        operation = self._begin(done, pieces, registered=registered)
        ep, context = self._endpoint, operation.context
        if len(pieces) == 1:
            (data,) = pieces
            memory = registered[0].mem_desc if registered else self._ffi.NULL
            if tag is None:
                code = ep.msg.send(ep, data, len(data), memory, to, context)
            else:
                code = ep.tagged.send(ep, data, len(data), memory, to, tag, context)
        else:
            iov, memories = self._iov, self._descriptors
            for index, piece in enumerate(pieces):
                iov[index].iov_base, iov[index].iov_len = piece, len(piece)
                memories[index] = registered[index].mem_desc if registered else self._ffi.NULL
            if tag is None:
                code = ep.msg.sendv(ep, iov, memories, len(pieces), to, context)
            else:
                code = ep.tagged.sendv(ep, iov, memories, len(pieces), to, tag, context)
        return self._begun(operation, code, "sending")

    def receive_untagged(self, memory: Any, done: Done) -> None:
        """Receive untagged messages into `memory`, until it is used up: then `done` is told so by MULTI_RECV."""
        registered = [self._register(memory)] if self._local else ()
        operation = self._begin(done, memory, many=True, registered=registered)
        message = self._ffi.new("struct fi_msg *")
        if registered:
            self._descriptors[0] = registered[0].mem_desc
            message.desc = self._descriptors
        self._one.iov_base, self._one.iov_len = memory, len(memory)
        message.msg_iov, message.iov_count, message.addr, message.context = self._one, 1, _ANYBODY, operation.context
        self._begun(operation, self._endpoint.msg.recvmsg(self._endpoint, message, c.MULTI_RECV), "receiving")

    def receive_tagged(self, memory: Any, tag: int, ignore: int, done: Done) -> None:
        """Receive one message whose tag is `tag` but for the bits in `ignore`."""
        registered = [self._register(memory)] if self._local else ()
        operation, ep = self._begin(done, memory, registered=registered), self._endpoint
        described = registered[0].mem_desc if registered else self._ffi.NULL
        code = ep.tagged.recv(ep, memory, len(memory), described, _ANYBODY, tag, ignore, operation.context)
        self._begun(operation, code, "receiving")

    def look(self) -> Found | None:
        """A tagged message that has arrived and that nobody waits for. The same until it is claimed or discarded."""
        if self._found is None:
            if self._peeking is None:
                operation = self._begin(self._looked, None)
                self._peeking = operation.context
                self._tagged.iov_count, self._tagged.context = 0, operation.context
                code = self._endpoint.tagged.recvmsg(self._endpoint, self._tagged, c.PEEK | c.CLAIM)
                if code < 0:
                    self._peeking = None
                    self._forget(operation)
                    if code not in (-c.ENOMSG, -c.EAGAIN):
                        self.ofi.check(code, "looking for messages")
            for _ in range(_ANSWERED):
                if self._peeking is None:
                    break
                Endpoint.progress(self)
        return self._found

    def _looked(self, completion: Completion) -> None:
        context, self._peeking = self._peeking, None
        if not completion.error:
            self._found = Found(completion.tag, completion.length, context)

    def claim(self, memory: Any, done: Done) -> None:
        """Receive the message that was found into `memory`, which has its length."""
        self._claim(memory, c.CLAIM, done)

    def discard(self) -> None:
        """Throw the message that was found away."""
        self._claim(self._ffi.new("char[1]"), c.CLAIM | c.DISCARD, lambda completion: None)

    def _claim(self, memory: Any, flags: int, done: Done) -> None:
        assert self._found is not None
        tag, length, context = self._found
        self._found = None
        registered = [self._register(memory)] if self._local else ()
        operation = self._begin(
            done, memory, context, registered=registered, fetches=length > self.whole and not flags & c.DISCARD
        )
        self._tagged.desc = self._ffi.NULL
        if registered:
            self._descriptors[0], self._tagged.desc = registered[0].mem_desc, self._descriptors
        self._one.iov_base, self._one.iov_len = memory, length if not flags & c.DISCARD else 0
        self._tagged.iov_count, self._tagged.context, self._tagged.tag = 1, context, tag
        code = self._endpoint.tagged.recvmsg(self._endpoint, self._tagged, flags)
        self._tagged.tag = 0
        self._begun(operation, code, "receiving")

    def read(self, source: int, address: int, key: int, into: Any, at: int, length: int, done: Done) -> bool:
        """Begin to read memory of a peer's into part of a buffer. False if that must be tried again later."""
        piece = self._ffi.buffer(into + at, length)
        view = self._ffi.from_buffer(piece, require_writable=True)
        registered = [self._register(view)] if self._local else ()
        operation = self._begin(done, view, registered=registered, fetches=True)
        described = registered[0].mem_desc if registered else self._ffi.NULL
        code = self._endpoint.rma.read(self._endpoint, view, length, described, source, address, key, operation.context)
        return self._begun(operation, code, "reading memory")

    # Completions

    def _register(self, memory: Any) -> Any:
        return self.domain.register(memory, c.SEND | c.RECV | c.READ)

    def _unregister(self, registered: Sequence[Any]) -> None:
        for one in registered:
            self.domain.unregister(one)

    def _begin(
        self,
        done: Done,
        keep: Any,
        context: Any = None,
        many: bool = False,
        registered: Sequence[Any] = (),
        fetches: bool = False,
    ) -> _Operation:
        if context is None:
            context = self._ffi.new(f"void *[{_CONTEXT}]")
        operation = _Operation(context, done, keep, many, registered, fetches)
        self._operations[int(self._ffi.cast("uintptr_t", context))] = operation
        return operation

    def _begun(self, operation: _Operation, code: int, doing: str) -> bool:
        if code < 0:
            self._forget(operation)
            if code != -c.EAGAIN:
                self.ofi.check(code, doing)
        return code == 0

    def _forget(self, operation: _Operation) -> None:
        del self._operations[int(self._ffi.cast("uintptr_t", operation.context))]
        self._unregister(operation.registered)

    def progress(self) -> bool:
        """Let libfabric work, and tell of what is done. Whether anything was."""
        ffi, queue = self._ffi, self._queue
        count = queue.ops.read(queue, self._entries, _AT_ONCE)
        if count > 0:
            for entry in self._entries[0:count]:
                self._ended(entry, 0)
            return True
        if count == -c.EAVAIL:
            error = self._error
            ffi.buffer(error)[:] = bytes(ffi.sizeof(error[0]))
            if queue.ops.readerr(queue, error, 0) == 1:
                self._ended(error, error.err or c.EIO)
            return True
        if count not in (0, -c.EAGAIN):
            self.ofi.check(count, "asking what is done")
        return False

    def _ended(self, entry: Any, error: int) -> None:
        key = int(self._ffi.cast("uintptr_t", entry.op_context))
        flags = entry.flags
        operation = self._operations.get(key)
        if operation is None:
            return  # of an operation that was cut off
        if error or flags & c.MULTI_RECV or not operation.many:
            del self._operations[key]
            self._unregister(operation.registered)
        if operation.context is not self._peeking:
            self._count += 1
        if not self._closing or operation.done == self._looked:  # nobody is told what ends by being closed
            operation.done(Completion(error, flags, entry.len, entry.buf, entry.tag))

    def arm(self) -> bool:
        """Whether one may sleep now: otherwise there is something to do."""
        return bool(self._fabric.ops.trywait(self._fabric, self._waited_for, 1) == 0)

    def sleep(self, waker: Waker, seconds: float) -> bool:
        """Sleep until there is something to do, or `waker` is set, which it then is no more. Whether libfabric woke us.

        The only method that another thread may run beside others.
        """
        poll = select.poll()
        for descriptor in (*self._wakes, waker.descriptor):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        if waker.descriptor in ready:
            waker.clear()
        return not ready.isdisjoint(self._wakes)

    def _drain(self) -> None:
        """Throw away what nobody has received: closing an endpoint over it crashes in libfabric 2.5."""
        try:
            for number in range(_DRAINED):
                if number == _ENOUGH:
                    self._cut()  # it would send more while we look for more
                if Endpoint.look(self) is None and self._peeking is None:
                    break
                if self._found is not None:
                    Endpoint.discard(self)
        except TransportError:
            pass  # it is broken already

    def _fetching(self) -> bool:
        return any(operation.fetches for operation in self._operations.values())

    def _cut(self) -> None:
        """End what is being fetched, as if the peer had gone: closing an endpoint over it crashes in libfabric 1.

        It ends what is being sent to us, too.
        """
        if self._known is None:
            return
        with suppress(ValueError, struct.error):  # providers that do not use TCP have other names
            (host, port), peer = host_and_port(self.name), host_and_port(self._known)
            for connection in _connections():
                with connection, suppress(OSError):
                    here = connection.getsockname()
                    ours = here[1] == port and (here[0] == host or host in ANY_INTERFACE)
                    if ours or connection.getpeername()[:2] == peer:
                        connection.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + _CUT
        with suppress(TransportError):
            while self._fetching() and time.monotonic() < end:
                Endpoint.progress(self)

    def close(self) -> None:
        """Close everything, in the order that libfabric wants. What was under way is dropped."""
        self._closing = True
        if self._enabled:
            self._enabled = False
            if self._fetching() and self.ofi.version.startswith("1."):
                self._cut()
            self._drain()
        if len(self._opened) == _ALL:
            self._opened.pop().fid.ops.close(self._fid)  # the endpoint first: nothing may use memory any more
        for operation in self._operations.values():
            self._unregister(operation.registered)
        while self._opened:
            one = self._opened.pop()
            one.fid.ops.close(self._ffi.addressof(one.fid))
        if self._entered:
            self._entered = False
            self.domain.leave()
        self._operations.clear()


class Pair(Endpoint):
    """Two endpoints that are used as one, for providers with which a message that nobody claims holds up all behind it.

    Messages whose tag is `apart` go from second to second, and are the only ones to be looked for; all others are
    waited for by the first, which nothing can hold up. Between the two there is no order. The name is that of both.
    """

    lanes = 2

    def __init__(self, provider: str, node: str, apart: Callable[[int], bool]) -> None:
        super().__init__(provider, node, None)
        self._apart = apart
        try:
            # In a domain of its own: what waits to be claimed is found by whoever looks in the same.
            self._second = Endpoint(provider, node, None)
        except BaseException:
            super().close()
            raise
        self._wakes += self._second._wakes

    @property
    def name(self) -> bytes:
        return super().name + self._second.name

    def insert(self, name: bytes) -> int:
        half = len(super().name)
        number = super().insert(name[:half])
        other = self._second.insert(name[half:] or name)  # one that is no pair takes a number in both, too
        if number != other:
            raise TransportError(f"{name.hex()} names one endpoint twice")
        return number

    @property
    def ended(self) -> int:
        return super().ended + self._second.ended

    @property
    def found(self) -> Found | None:
        return self._second.found

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], done: Done) -> bool:
        if tag is not None and self._apart(tag):
            return self._second.send(to, tag, pieces, done)
        return super().send(to, tag, pieces, done)

    def look(self) -> Found | None:
        return self._second.look()

    def claim(self, memory: Any, done: Done) -> None:
        self._second.claim(memory, done)

    def discard(self) -> None:
        self._second.discard()

    def progress(self) -> bool:
        first, second = super().progress(), self._second.progress()
        return first or second

    def arm(self) -> bool:
        return super().arm() and self._second.arm()

    def close(self) -> None:
        try:
            self._second.close()
        finally:
            super().close()
