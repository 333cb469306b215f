"""Endpoints of libfabric for reliable datagrams (RDM): messages of two kinds, between any endpoints that know each
other's names, and descriptors to wait on. Nothing here is thread-safe, and nothing knows what messages mean.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from dissociated.base.once import once
from dissociated.errors import TransportError
from dissociated.transport.native.addresses import host_and_port
from dissociated.transport.native.fabric import _ofi as c
from dissociated.transport.native.fabric._ofi import ofi
from dissociated.transport.native.fabric.domain import QUEUE, Domain, close_object, find_info
from dissociated.transport.native.fabric.operations import Completion, Done, Filling, Operation, Operations
from dissociated.transport.native.interrupts import interrupts_held
from dissociated.transport.native.threads import Waker
from dissociated.uri import ANY_INTERFACE

ANY_TAG = 2**64 - 1
_ANYBODY = 2**64 - 1
_COMPLETIONS_READ = 64  # completions that are read at once
_EAGER = 1 << 13  # bytes up to which messages are always copied on the way, and need not be registered
_RXM_EAGER = 1 << 14
_ALL = 3  # objects that an endpoint consists of
_MAX_DRAINED = 1 << 16  # messages that are thrown away, at most
_MAX_DISCARDED_AT_ONCE = 64  # messages that are thrown away before the peer is kept from sending more
_ANSWERED = 16  # reads of the queue after which a provider has answered, behind what else was done
_MAX_UNANSWERED = 64  # times as many without an answer: a signal has interrupted whoever read it
_CUT_OFF_TIMEOUT = 0.25  # seconds for what is cut off to end
#: An untagged message may have this many bytes: what is left in a buffer for many of them must take one.
MAX_SMALL_UNTAGGED = 1 << 16


class PeekedMessage(NamedTuple):
    """A tagged message that has been peeked at, and must now be claimed or discarded."""

    tag: int
    length: int
    context: Any


class Heap:
    """The C library's heap, as far as endpoints use it.

    An endpoint takes 33 MB of it. glibc keeps what is freed, apart for each thread that has allocated: clients that
    open and give up many connections would keep gigabytes. So freed memory goes back to the system as soon as closed
    endpoints have used more than open ones do. That takes some milliseconds; opening an endpoint takes more.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may interrupt its owner
        self._open = self._closed = 0  # endpoints; those that were closed since memory was last given back

    def opened(self) -> None:
        """Count an endpoint that is being opened."""
        with self._lock:
            self._open += 1

    def closed(self) -> None:
        """Count an endpoint that is closed, and give memory back if it is time."""
        with self._lock:
            self._open -= 1
            self._closed += 1
            if self._closed < self._open:
                return
            self._closed = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries than glibc keep less
        if trim is not None:
            trim(0)


@once
def heap_of(pid: int) -> Heap:
    """Return the heap of this process. A child that was forked closes none of its parent's endpoints."""
    return Heap()


class FabricEndpoint:
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
        self._operations = Operations(self._ffi)
        self._heap = heap_of(os.getpid())
        self._entered = self._enabled = self._closing = False
        self._opened: list[Any] = []  # what has to be closed, last first
        self._count = 0  # of operations that have ended, but for looking
        self._peeking: Any = None
        self._found: PeekedMessage | None = None
        self._provider, self._rma, self._rxm = provider, rma, provider.endswith("ofi_rxm")
        self._known: bytes | None = None  # the name of the endpoint that was inserted last
        info = find_info(
            self.ofi, provider, node, service, c.SOURCE, rma, f"opening {provider} at {node}:{service or '*'}"
        )
        try:
            self.iov_limit = min(info.tx_attr.iov_limit, 4)
            self.max_message: int = info.ep_attr.max_msg_size
            self.protocol = f"{info.ep_attr.protocol}.{info.ep_attr.protocol_version}"
            #: Messages up to this many bytes arrive whole; larger ones are fetched from the peer when they are claimed.
            self.eager_limit: int = self.max_message
            if self._rxm:
                self.eager_limit = _RXM_EAGER
                # Otherwise it registers memory itself, and where a transfer is cut off never lets go of it.
                info.domain_attr.mr_mode |= c.MR_LOCAL
            #: Untagged messages are sent as such up to this many bytes. Larger ones the peer would fetch into a buffer
            #: for many: rxm of 1.17 then says too early that it is used up, and crashes if it is closed meanwhile.
            self.max_untagged = min(MAX_SMALL_UNTAGGED, self.eager_limit)
            self._local = bool(info.domain_attr.mr_mode & c.MR_LOCAL)
            #: Whether addresses for reads are those of the server's process, rather than offsets.
            self.virtual_addresses = bool(info.domain_attr.mr_mode & c.MR_VIRT_ADDR)
            new = self._ffi.new
            self._entries = new(f"struct fi_cq_tagged_entry[{_COMPLETIONS_READ}]")
            self._error = new("struct fi_cq_err_entry *")
            self._tagged = new("struct fi_msg_tagged *")
            self._tagged.addr, self._tagged.ignore = _ANYBODY, ANY_TAG
            self._one = new("struct iovec *")
            self._tagged.msg_iov = self._one
            self._iov = new(f"struct iovec[{self.iov_limit}]")
            self._descriptors = new(f"void *[{self.iov_limit}]")
            self._open(info, domain)
        except BaseException:
            self.close()
            raise
        finally:
            self._lib.fi_freeinfo(info)

    def _open(self, info: Any, shared: Domain | None) -> None:
        ffi, check, null = self._ffi, self.ofi.check, self._ffi.NULL
        action = f"opening {self._provider}"

        def opened(kind: str, call: Callable[..., int], *arguments: Any) -> Any:
            created = ffi.new(f"struct {kind} **")
            check(call(*arguments, created, null), action)
            self._opened.append(created[0])
            return created[0]

        self.domain = self._operations.domain = shared or Domain(self.ofi, info)
        self.domain.enter()
        self._entered = True
        self._heap.opened()
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
            check(self._endpoint.fid.ops.bind(self._fid, ffi.addressof(other.fid), flags), action)
        least = ffi.new("size_t *", MAX_SMALL_UNTAGGED)
        check(self._endpoint.ops.setopt(self._fid, 0, c.OPT_MIN_MULTI_RECV, least, ffi.sizeof("size_t")), action)
        check(self._endpoint.fid.ops.control(self._fid, c.ENABLE, null), action)
        self._enabled = True
        queue_fid = ffi.addressof(self._queue.fid)
        descriptor = ffi.new("int *")
        check(self._queue.fid.ops.control(queue_fid, c.GETWAIT, descriptor), action)
        self.wakes = [int(descriptor[0])]  #: descriptors, at which there is something to read when there is to do
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
        info = find_info(self.ofi, self._provider, node, service, 0, self._rma, f"looking for {node}:{service}")
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
    def peeked(self) -> PeekedMessage | None:
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
        operation = self._operations.begin(done, pieces, registered=registered)
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
        """Receive untagged messages into `memory`, until it is used up: `done` is told so as the last of them ends."""
        registered = [self._register(memory)] if self._local else ()
        least = MAX_SMALL_UNTAGGED if self._rxm else None
        filling = Filling(int(self._ffi.cast("uintptr_t", memory)), len(memory), least)
        operation = self._operations.begin(done, memory, filling=filling, registered=registered)
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
        operation, ep = self._operations.begin(done, memory, registered=registered), self._endpoint
        described = registered[0].mem_desc if registered else self._ffi.NULL
        code = ep.tagged.recv(ep, memory, len(memory), described, _ANYBODY, tag, ignore, operation.context)
        self._begun(operation, code, "receiving")

    def peek(self) -> PeekedMessage | None:
        """A tagged message that has arrived and that nobody waits for. The same until it is claimed or discarded."""
        if self._found is None:
            if self._peeking is None:
                operation = self._operations.begin(self._on_peeked, None)
                self._peeking = operation.context
                self._tagged.iov_count, self._tagged.context = 0, operation.context
                code = self._endpoint.tagged.recvmsg(self._endpoint, self._tagged, c.PEEK | c.CLAIM)
                if code < 0:
                    self._peeking = None
                    self._operations.forget(operation)
                    if code not in (-c.ENOMSG, -c.EAGAIN):
                        self.ofi.check(code, "looking for messages")
            for _ in range(_ANSWERED):
                if self._peeking is None:
                    break
                self.progress()
        return self._found

    def _on_peeked(self, completion: Completion) -> None:
        context, self._peeking = self._peeking, None
        if not completion.error:
            self._found = PeekedMessage(completion.tag, completion.length, context)

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
        operation = self._operations.begin(
            done, memory, context, registered=registered, fetches=length > self.eager_limit and not flags & c.DISCARD
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
        operation = self._operations.begin(done, (into, view), registered=registered, fetches=True)  # no view keeps it
        described = registered[0].mem_desc if registered else self._ffi.NULL
        code = self._endpoint.rma.read(self._endpoint, view, length, described, source, address, key, operation.context)
        return self._begun(operation, code, "reading memory")

    # Completions

    def _register(self, memory: Any) -> Any:
        """Let libfabric use memory for an operation, which then owns what is returned."""
        return self.domain.register(memory, c.SEND | c.RECV | c.READ)

    def _begun(self, operation: Operation, code: int, action: str) -> bool:
        if code < 0:
            self._operations.forget(operation)
            if code != -c.EAGAIN:
                self.ofi.check(code, action)
        return code == 0

    def progress(self) -> bool:
        """Let libfabric work, and tell of what is done. Whether anything was."""
        ffi, queue = self._ffi, self._queue
        count = queue.ops.read(queue, self._entries, _COMPLETIONS_READ)
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
        ended = self._operations.end(entry, error)
        if ended is None:
            return
        operation, whole = ended
        if operation.context is not self._peeking:
            self._count += 1
        if not self._closing or operation.done == self._on_peeked:  # nobody is told what ends by being closed
            operation.done(Completion(error, entry.flags, entry.len, entry.buf, entry.tag, whole))

    def arm(self) -> bool:
        """Whether one may sleep now: otherwise there is something to do."""
        return bool(self._fabric.ops.trywait(self._fabric, self._waited_for, 1) == 0)

    def sleep(self, waker: Waker, seconds: float) -> bool:
        """Sleep until there is something to do, or `waker` is set, which it then is no more. Whether libfabric woke us.

        The only method that another thread may run beside others.
        """
        return waker.sleep(self.wakes, seconds)

    def _drain(self) -> None:
        """Throw away what nobody has received: closing an endpoint over it crashes in libfabric 2.5."""
        try:
            unanswered = 0
            for number in range(_MAX_DRAINED):
                if number == _MAX_DISCARDED_AT_ONCE:
                    self._cut()  # it would send more while we look for more
                if self.peek() is not None:
                    self.discard()
                    unanswered = 0
                elif self._peeking is None or unanswered == _MAX_UNANSWERED:
                    break
                else:
                    unanswered += 1
        except TransportError:
            pass  # it is broken already

    def _cut(self) -> None:
        """End what is being fetched, as if the peer had gone: closing an endpoint over it crashes in libfabric 1.

        It ends what is being sent to us, too.
        """
        if self._known is None:
            return
        with suppress(ValueError, struct.error):  # providers that do not use TCP have other names
            _shut_down(self.name, self._known)
        end = time.monotonic() + _CUT_OFF_TIMEOUT
        with suppress(TransportError):
            while self._operations.fetching and time.monotonic() < end:
                self.progress()

    def close(self) -> None:
        """Close everything, in the order that libfabric wants. Operations in progress are dropped."""
        self._closing = True
        with interrupts_held():
            self._give_back()

    def _give_back(self) -> None:
        """Close what is still open."""
        if self._enabled:
            if self._operations.fetching and self.ofi.version.startswith("1."):
                self._cut()
            self._drain()
            self._enabled = False
        if len(self._opened) == _ALL:  # the endpoint first: nothing may use memory any more
            close_object(self._ffi, self._opened.pop())
        self._operations.unregister_all()
        while self._opened:
            close_object(self._ffi, self._opened.pop())
        if self._entered:
            self._entered = False
            self.domain.leave()
            self._heap.closed()
        self._operations.clear()


class DualEndpoint:
    """Two endpoints that are used as one, for providers with which a message that nobody claims holds up all behind it.

    Messages whose tag is `apart` go from second to second, and are the only ones to be looked for; all others are
    waited for by the first, which nothing can hold up. Between the two there is no order. The name is that of both.
    """

    lanes = 2

    def __init__(self, provider: str, node: str, apart: Callable[[int], bool]) -> None:
        self._apart = apart
        self._first = first = FabricEndpoint(provider, node, None)
        try:
            # In a domain of its own: what waits to be claimed is found by whoever looks in the same.
            self._second = FabricEndpoint(provider, node, None)
        except BaseException:
            first.close()
            raise
        self.ofi, self.iov_limit, self.max_message = first.ofi, first.iov_limit, first.max_message
        self.protocol, self.eager_limit, self.max_untagged = first.protocol, first.eager_limit, first.max_untagged
        self.wakes = first.wakes + self._second.wakes
        self.find, self.read = first.find, first.read
        self.receive_untagged, self.receive_tagged = first.receive_untagged, first.receive_tagged
        self.peek, self.claim, self.discard = self._second.peek, self._second.claim, self._second.discard

    @property
    def name(self) -> bytes:
        """What others insert to reach this one."""
        return self._first.name + self._second.name

    def insert(self, name: bytes) -> int:
        """Make another known. Its number, for sending to it. Raises TransportError for what is no name of two."""
        half = len(self._first.name)
        number = self._first.insert(name[:half])
        other = self._second.insert(name[half:] or name)  # one that is no pair takes a number in both, too
        if number != other:
            raise TransportError(f"{name.hex()} names one endpoint twice")
        return number

    @property
    def ended(self) -> int:
        """How many operations have ended, but for looking."""
        return self._first.ended + self._second.ended

    @property
    def peeked(self) -> PeekedMessage | None:
        """What was found and is neither claimed nor discarded."""
        return self._second.peeked

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], done: Done) -> bool:
        """See `FabricEndpoint`."""
        apart = tag is not None and self._apart(tag)
        return (self._second if apart else self._first).send(to, tag, pieces, done)

    def progress(self) -> bool:
        """Let libfabric work, for both. Whether anything was done."""
        first, second = self._first.progress(), self._second.progress()
        return first or second

    def arm(self) -> bool:
        """Whether one may sleep now: otherwise there is something to do."""
        return self._first.arm() and self._second.arm()

    def sleep(self, waker: Waker, seconds: float) -> bool:
        """See `FabricEndpoint`. The only method that another thread may run beside others."""
        return waker.sleep(self.wakes, seconds)

    def close(self) -> None:
        """Close both. What was under way is dropped."""
        try:
            self._second.close()
        finally:
            self._first.close()


#: The endpoint, or two, of one connection.
ConnectionEndpoint: TypeAlias = FabricEndpoint | DualEndpoint


def _shut_down(name: bytes, other: bytes) -> None:
    """End the TCP connections of the endpoint of this name, and those with the other. Raises ValueError, struct.error.

    libfabric gives no way to them: they are found among the descriptors of this process. The C library is asked, which
    takes no descriptor: a `socket` would have to be a duplicate, and there may be no more.

    The caller has the endpoint for itself: libfabric closes those connections only while it is let work, so a
    number cannot become another's here. A duplicate would not be safer: closing one of a file gives up the locks of
    this process on it, such as those of SQLite.
    """
    (host, port), peer = host_and_port(name), host_and_port(other)
    libc, stream = ctypes.CDLL(None), struct.pack("i", socket.SOCK_STREAM)
    for descriptor in _descriptors():
        with suppress(OSError, ValueError, struct.error):  # closed meanwhile, or none of those
            here = host_and_port(_told(libc.getsockname, descriptor))
            is_stream = _told(libc.getsockopt, descriptor, socket.SOL_SOCKET, socket.SO_TYPE) == stream
            ours = here[1] == port and (here[0] == host or host in ANY_INTERFACE)
            if is_stream and (ours or host_and_port(_told(libc.getpeername, descriptor)) == peer):
                libc.shutdown(descriptor, socket.SHUT_RDWR)


def _told(call: Callable[..., int], descriptor: int, *about: int) -> bytes:
    """Ask the C library about a socket. Raises OSError."""
    memory, length = ctypes.create_string_buffer(256), ctypes.c_uint32(256)
    if call(descriptor, *about, memory, ctypes.byref(length)):
        raise OSError(f"the descriptor {descriptor} is none of a socket of that kind")
    return memory.raw[: length.value]


def _descriptors() -> Iterable[int]:
    """List the descriptors of this process, or all that it can have if none is left to list them with.

    The latter are hardly more: almost all are open then. Each takes a few microseconds.
    """
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
