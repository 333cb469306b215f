"""Endpoints of libfabric for reliable datagrams (RDM).

They send tagged and untagged messages to any endpoint whose name they know, and have descriptors to wait on. Nothing
here is thread-safe, and nothing depends on the content of messages.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from dissociated.base.interrupts import interrupts_held
from dissociated.errors import TransportError
from dissociated.transport.native.addresses import shut_down_between
from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.libfabric import QUEUE, ofi
from dissociated.transport.native.fabric.memory import (
    Completion,
    Domain,
    Done,
    Filling,
    Operation,
    Operations,
    heap_of,
)

ANY_TAG = 2**64 - 1
_ANYBODY = 2**64 - 1
_COMPLETIONS_READ = 64  # completions that are read at once
_EAGER = 1 << 13  # size in bytes up to which libfabric copies messages, so that they need not be registered
_RXM_EAGER = 1 << 14
_ALL = 3  # the number of objects of an open endpoint
_MAX_DRAINED = 1 << 16  # limit of messages that are discarded by `close`
_MAX_DISCARDED_AT_ONCE = 64  # messages that are discarded before the peer's connection is cut
_ANSWERED = 16  # reads of the completion queue within which a provider answers a peek
_MAX_UNANSWERED = 64  # peeks without an answer after which it is considered lost, as after a signal
_CUT_OFF_TIMEOUT = 0.25  # seconds for operations to end after the connection was cut
#: Limit of bytes of an untagged message. A buffer for many of them is used up when it has less than this left.
MAX_SMALL_UNTAGGED = 1 << 16


class PeekedMessage(NamedTuple):
    """A tagged message that was found by a peek, and must be claimed or discarded."""

    tag: int
    length: int
    context: Any


class FabricEndpoint:
    """An endpoint that is bound to an address. Owns all objects that it opens.

    Args:
        provider: The name of the libfabric provider.
        node: The host to bind to, or the provider's equivalent.
        service: The port to bind to, or the provider's equivalent; None for any.
        rma: Whether the endpoint can read memory that peers have registered.
        domain: The domain to share, whose registered memory peers can then read over this endpoint.

    Raises:
        TransportError: libfabric refuses.
    """

    #: The number of libfabric endpoints. Messages sent by the same one arrive in libfabric's order.
    lanes = 1

    def __init__(
        self, provider: str, node: str, service: str | None, rma: bool = False, domain: Domain | None = None
    ) -> None:
        self.ofi = ofi()
        self._ffi, self._lib = self.ofi.ffi, self.ofi.lib
        self._operations = Operations(self._ffi)
        self._heap = heap_of(os.getpid())
        self._entered = self._enabled = self._closing = False
        self._opened: list[Any] = []  # objects that are open, to be closed in reverse order
        self.ended_count = 0  #: the number of operations that have ended, except peeks
        self._peeking: Any = None
        #: The message that was found by a peek, and is neither claimed nor discarded yet.
        self.peeked: PeekedMessage | None = None
        self._provider, self._rma, self._rxm = provider, rma, provider.endswith("ofi_rxm")
        self._last_name: bytes | None = None  # the name of the endpoint that was inserted last
        info = self.ofi.find(provider, node, service, c.SOURCE, rma, f"opening {provider} at {node}:{service or '*'}")
        try:
            self.iov_limit = min(info.tx_attr.iov_limit, 4)
            self.max_message: int = info.ep_attr.max_msg_size
            self.protocol = f"{info.ep_attr.protocol}.{info.ep_attr.protocol_version}"
            #: Size in bytes up to which messages arrive whole. Larger ones are fetched from the peer when claimed.
            self.eager_limit: int = self.max_message
            if self._rxm:
                self.eager_limit = _RXM_EAGER
                # Without this, rxm registers memory itself, and never releases it after an interrupted transfer.
                info.domain_attr.mr_mode |= c.MR_LOCAL
            #: Size in bytes up to which untagged messages are sent untagged. The peer would fetch larger ones into a
            #: buffer for many messages, which rxm of 1.17 then reports as used up too early, and crashes if closed.
            self.max_untagged = min(MAX_SMALL_UNTAGGED, self.eager_limit)
            self._local = bool(info.domain_attr.mr_mode & c.MR_LOCAL)
            #: Whether addresses for reads are virtual addresses of the server's process, rather than offsets.
            self.virtual_addresses = bool(info.domain_attr.mr_mode & c.MR_VIRT_ADDR)
            new = self._ffi.new
            self._entries = new(f"struct fi_cq_tagged_entry[{_COMPLETIONS_READ}]")
            self._error = new("struct fi_cq_err_entry *")
            self._tagged = new("struct fi_msg_tagged *")
            self._tagged.addr, self._tagged.ignore = _ANYBODY, ANY_TAG
            self._single_iov = new("struct iovec *")
            self._tagged.msg_iov = self._single_iov
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
        for attached, flags in ((self._queue, c.SEND | c.RECV), (self._vector, 0)):
            check(self._endpoint.fid.ops.bind(self._fid, ffi.addressof(attached.fid), flags), action)
        least = ffi.new("size_t *", MAX_SMALL_UNTAGGED)
        check(self._endpoint.ops.setopt(self._fid, 0, c.OPT_MIN_MULTI_RECV, least, ffi.sizeof("size_t")), action)
        check(self._endpoint.fid.ops.control(self._fid, c.ENABLE, null), action)
        self._enabled = True
        queue_fid = ffi.addressof(self._queue.fid)
        descriptor = ffi.new("int *")
        check(self._queue.fid.ops.control(queue_fid, c.GETWAIT, descriptor), action)
        self.wakes = [int(descriptor[0])]  #: descriptors that are readable when there is work to do
        self._waited_for = ffi.new("struct fid *[1]", [queue_fid])

    # Names and addresses

    @property
    def name(self) -> bytes:
        """The name that peers insert to reach this endpoint."""
        ffi = self._ffi
        length, memory = ffi.new("size_t *", 256), ffi.new("char[256]")
        self.ofi.check(self._endpoint.cm.getname(self._fid, memory, length), "asking for an endpoint's name")
        return bytes(ffi.buffer(memory, length[0]))

    def find(self, node: str, service: str) -> bytes:
        """Return the name of the endpoint that is bound to `node` and `service`."""
        info = self.ofi.find(self._provider, node, service, 0, self._rma, f"looking for {node}:{service}")
        try:
            return bytes(self._ffi.buffer(info.dest_addr, info.dest_addrlen))
        finally:
            self._lib.fi_freeinfo(info)

    def insert(self, name: bytes) -> int:
        """Add the endpoint called `name` to the address vector.

        Returns:
            The number of the endpoint, for sending to it.

        Raises:
            TransportError: The name is invalid.
        """
        number = self._ffi.new("fi_addr_t *")
        padded = name.ljust(256, b"\0")
        if self._vector.ops.insert(self._vector, self._ffi.from_buffer(padded), 1, number, 0, self._ffi.NULL) != 1:
            raise TransportError(f"libfabric {self.ofi.version} knows no endpoint {name.hex()}")
        self._last_name = name
        return int(number[0])

    def remove(self, number: int) -> None:
        """Remove an endpoint from the address vector."""
        self._vector.ops.remove(self._vector, self._ffi.new("fi_addr_t *", number), 1, 0)

    # Messages

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], on_done: Done) -> bool:
        """Begin to send a message.

        Args:
            to: The number of the receiving endpoint.
            tag: The tag; None for an untagged message.
            pieces: At most `iov_limit` cffi buffers, which are kept alive and must not change before `on_done`.
            on_done: Called when the send has ended.

        Returns:
            False if libfabric does not accept the message now, so that it must be sent again later.

        Raises:
            TransportError: libfabric refuses.
        """
        assert len(pieces) <= self.iov_limit  # libfabric would crash, as it does not check the number
        registered = self._register(*pieces) if sum(map(len, pieces)) > _EAGER else ()
        operation = self._operations.begin(on_done, pieces, registered=registered)
        ep, context = self._endpoint, operation.context
        if len(pieces) == 1:
            (data,) = pieces
            memory = self._description(operation)
            if tag is None:
                code = ep.msg.send(ep, data, len(data), memory, to, context)
            else:
                code = ep.tagged.send(ep, data, len(data), memory, to, tag, context)
        else:
            iov, memories = self._iov, self._descriptors
            for index, piece in enumerate(pieces):
                iov[index].iov_base, iov[index].iov_len = piece, len(piece)
                memories[index] = self._description(operation, index)
            if tag is None:
                code = ep.msg.sendv(ep, iov, memories, len(pieces), to, context)
            else:
                code = ep.tagged.sendv(ep, iov, memories, len(pieces), to, tag, context)
        return self._check_begun(operation, code, "sending")

    def receive_untagged(self, memory: Any, on_done: Done) -> None:
        """Receive untagged messages into `memory` until it is used up.

        `on_done` is called for each message. Its completion has `last` set when the memory is used up.
        """
        least = MAX_SMALL_UNTAGGED if self._rxm else None
        filling = Filling(int(self._ffi.cast("uintptr_t", memory)), len(memory), least)
        operation = self._operations.begin(on_done, memory, filling=filling, registered=self._register(memory))
        message = self._ffi.new("struct fi_msg *")
        self._descriptors[0], message.desc = self._description(operation), self._descriptors
        self._single_iov.iov_base, self._single_iov.iov_len = memory, len(memory)
        message.msg_iov, message.iov_count, message.addr, message.context = (
            self._single_iov,
            1,
            _ANYBODY,
            operation.context,
        )
        self._check_begun(operation, self._endpoint.msg.recvmsg(self._endpoint, message, c.MULTI_RECV), "receiving")

    def receive_tagged(self, memory: Any, tag: int, ignore: int, on_done: Done) -> None:
        """Receive one message into `memory`. Its tag must equal `tag`, except for the bits in `ignore`."""
        operation, ep = self._operations.begin(on_done, memory, registered=self._register(memory)), self._endpoint
        description = self._description(operation)
        code = ep.tagged.recv(ep, memory, len(memory), description, _ANYBODY, tag, ignore, operation.context)
        self._check_begun(operation, code, "receiving")

    def peek(self) -> PeekedMessage | None:
        """Return a tagged message that has arrived and for which no receive was posted, or None.

        Further calls return the same message until it is claimed or discarded.
        """
        if self.peeked is None:
            if self._peeking is None:
                operation = self._operations.begin(self._on_peeked, None)
                self._peeking = operation.context
                self._tagged.iov_count, self._tagged.context = 0, operation.context
                code = self._endpoint.tagged.recvmsg(self._endpoint, self._tagged, c.PEEK | c.CLAIM)
                if code < 0:
                    self._peeking = None
                    self._operations.remove(operation)
                    if code not in (-c.ENOMSG, -c.EAGAIN):
                        self.ofi.check(code, "looking for messages")
            for _ in range(_ANSWERED):
                if self._peeking is None:
                    break
                self.progress()
        return self.peeked

    def _on_peeked(self, completion: Completion) -> None:
        context, self._peeking = self._peeking, None
        if not completion.error:
            self.peeked = PeekedMessage(completion.tag, completion.length, context)

    def claim(self, memory: Any, on_done: Done) -> None:
        """Receive the peeked message into `memory`, which must have its length."""
        self._claim(memory, c.CLAIM, on_done)

    def discard(self) -> None:
        """Discard the peeked message."""
        self._claim(self._ffi.new("char[1]"), c.CLAIM | c.DISCARD, lambda completion: None)

    def _claim(self, memory: Any, flags: int, on_done: Done) -> None:
        assert self.peeked is not None
        tag, length, context = self.peeked
        self.peeked = None
        fetches = length > self.eager_limit and not flags & c.DISCARD
        registered = self._register(memory)
        operation = self._operations.begin(on_done, memory, context, registered=registered, fetches=fetches)
        self._descriptors[0], self._tagged.desc = self._description(operation), self._descriptors
        self._single_iov.iov_base, self._single_iov.iov_len = memory, length if not flags & c.DISCARD else 0
        self._tagged.iov_count, self._tagged.context, self._tagged.tag = 1, context, tag
        code = self._endpoint.tagged.recvmsg(self._endpoint, self._tagged, flags)
        self._tagged.tag = 0
        self._check_begun(operation, code, "receiving")

    def read(self, source: int, address: int, key: int, into: Any, at: int, length: int, on_done: Done) -> bool:
        """Begin to read `length` bytes of a peer's memory into the buffer `into` at offset `at`.

        Returns:
            False if libfabric does not accept the read now, so that it must be tried again later.

        Raises:
            TransportError: libfabric refuses.
        """
        piece = self._ffi.buffer(into + at, length)
        view = self._ffi.from_buffer(piece, require_writable=True)
        # The view does not keep `into` alive, so both are kept.
        operation = self._operations.begin(on_done, (into, view), registered=self._register(view), fetches=True)
        description = self._description(operation)
        code = self._endpoint.rma.read(
            self._endpoint, view, length, description, source, address, key, operation.context
        )
        return self._check_begun(operation, code, "reading memory")

    # Completions

    def _register(self, *pieces: Any) -> list[Any]:
        """Register memory for an operation, which owns the returned registrations, if the provider requires that."""
        return [self.domain.register(piece, c.SEND | c.RECV | c.READ) for piece in pieces if self._local]

    def _description(self, operation: Operation, index: int = 0) -> Any:
        """Return libfabric's description of a piece of the memory of `operation`; NULL if it is not registered."""
        return operation.registered[index].mem_desc if operation.registered else self._ffi.NULL

    def _check_begun(self, operation: Operation, code: int, action: str) -> bool:
        if code < 0:
            self._operations.remove(operation)
            if code != -c.EAGAIN:
                self.ofi.check(code, action)
        return code == 0

    def progress(self) -> bool:
        """Let libfabric work, and call `on_done` of operations that have ended. Return whether any has."""
        ffi, queue = self._ffi, self._queue
        count = queue.ops.read(queue, self._entries, _COMPLETIONS_READ)
        if count > 0:
            for entry in self._entries[0:count]:
                self._end(entry, 0)
            return True
        if count == -c.EAVAIL:
            error = self._error
            ffi.buffer(error)[:] = bytes(ffi.sizeof(error[0]))
            if queue.ops.readerr(queue, error, 0) == 1:
                self._end(error, error.err or c.EIO)
            return True
        if count not in (0, -c.EAGAIN):
            self.ofi.check(count, "asking what is done")
        return False

    def _end(self, entry: Any, error: int) -> None:
        operation_end = self._operations.end(entry, error)
        if operation_end is None:
            return
        operation, whole = operation_end
        if operation.context is not self._peeking:
            self.ended_count += 1
        # Operations that end because of `close` are not reported.
        if not self._closing or operation.on_done == self._on_peeked:
            operation.on_done(Completion(error, entry.flags, entry.len, entry.buf, entry.tag, whole))

    def arm(self) -> bool:
        """Prepare to sleep. Return False if there is work to do first."""
        return bool(self._fabric.ops.trywait(self._fabric, self._waited_for, 1) == 0)

    def _drain(self) -> None:
        """Discard unclaimed messages: libfabric 2.5 crashes if an endpoint is closed while it holds any."""
        try:
            unanswered = 0
            for number in range(_MAX_DRAINED):
                if number == _MAX_DISCARDED_AT_ONCE:
                    self._cut()  # keeps the peer from sending more meanwhile
                if self.peek() is not None:
                    self.discard()
                    unanswered = 0
                elif self._peeking is None or unanswered == _MAX_UNANSWERED:
                    break
                else:
                    unanswered += 1
        except TransportError:
            pass  # the endpoint has failed, so there is nothing to drain

    def _cut(self) -> None:
        """Cut the connection to the peer, which ends all fetches: closing during a fetch crashes in libfabric 1.

        It also keeps the peer from sending more.
        """
        if self._last_name is None:
            return
        with suppress(ValueError, struct.error):  # names of providers without TCP are no socket addresses
            shut_down_between(self.name, self._last_name)
        end = time.monotonic() + _CUT_OFF_TIMEOUT
        with suppress(TransportError):
            while self._operations.fetching and time.monotonic() < end:
                self.progress()

    def close(self) -> None:
        """Close all objects in the order that libfabric requires. Operations in progress are dropped."""
        self._closing = True
        with interrupts_held():
            self._give_back()

    def _give_back(self) -> None:
        """Close the objects that are still open."""
        if self._enabled:
            if self._operations.fetching and self.ofi.version.startswith("1."):
                self._cut()
            self._drain()
            self._enabled = False
        if len(self._opened) == _ALL:  # the endpoint goes first, so that nothing uses registered memory any more
            self.ofi.close(self._opened.pop())
        self._operations.unregister_all()
        while self._opened:
            self.ofi.close(self._opened.pop())
        if self._entered:
            self._entered = False
            self.domain.leave()
            self._heap.closed()
        self._operations.clear()


class DualEndpoint:
    """Two endpoints that are used as one, for providers with which an unclaimed message blocks all messages behind it.

    Messages whose tag satisfies `apart` are sent from the second endpoint to the peer's second endpoint, and only those
    are peeked at. Receives for all other messages are posted at the first endpoint, so nothing can block there.
    Messages of the two endpoints arrive in no particular order. The name consists of the names of both.
    """

    lanes = 2

    def __init__(self, provider: str, node: str, apart: Callable[[int], bool]) -> None:
        self._apart = apart
        self._first = first = FabricEndpoint(provider, node, None)
        try:
            # It has a domain of its own, because a peek also finds unclaimed messages of other endpoints of its domain.
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
        """The name that peers insert to reach this endpoint."""
        return self._first.name + self._second.name

    def insert(self, name: bytes) -> int:
        """Add the pair of endpoints called `name` to the address vectors.

        Returns:
            The number of the pair, for sending to it.

        Raises:
            TransportError: The name is invalid.
        """
        half = len(self._first.name)
        number = self._first.insert(name[:half])
        second_number = self._second.insert(
            name[half:] or name
        )  # a single name is added to both, to keep the numbers equal
        if number != second_number:
            raise TransportError(f"{name.hex()} names one endpoint twice")
        return number

    @property
    def ended_count(self) -> int:
        """The number of operations that have ended, except peeks."""
        return self._first.ended_count + self._second.ended_count

    @property
    def peeked(self) -> PeekedMessage | None:
        """The message that was found by a peek, and is neither claimed nor discarded yet."""
        return self._second.peeked

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], on_done: Done) -> bool:
        """Begin to send a message. See `FabricEndpoint.send`."""
        apart = tag is not None and self._apart(tag)
        return (self._second if apart else self._first).send(to, tag, pieces, on_done)

    def progress(self) -> bool:
        """Let libfabric work for both endpoints. Return whether any operation has ended."""
        first, second = self._first.progress(), self._second.progress()
        return first or second

    def arm(self) -> bool:
        """Prepare to sleep. Return False if there is work to do first."""
        return self._first.arm() and self._second.arm()

    def close(self) -> None:
        """Close both endpoints. Operations in progress are dropped."""
        try:
            self._second.close()
        finally:
            self._first.close()


#: The endpoint, or the pair of endpoints, of one connection.
ConnectionEndpoint: TypeAlias = FabricEndpoint | DualEndpoint
