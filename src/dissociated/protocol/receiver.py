"""The client's role in a stream ("Client Sequence"): pairs metadata with bodies, in any order of arrival."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Container, Iterator

from dissociated.base.buffers import MAX_METADATA, Buffer
from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.format.layout import SchemaLayout, layout_of
from dissociated.format.message import MISREAD, Header, HeaderType, buffer_extents, parse_header
from dissociated.protocol.delivery import Delivered, Delivery
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.run import recognize
from dissociated.protocol.states import Machine, Move, Side, State
from dissociated.protocol.wire import (
    SEQUENCE_MASK,
    AddressList,
    BodyKind,
    MetadataKind,
    parse_addresses,
    parse_body_tag,
    parse_metadata,
    unwrap,
)

#: Most bytes of bodies, and of metadata, that may wait for a message that they have overtaken.
MAX_WAITING_BYTES = 1 << 32
MAX_WAITING_METADATA = 1 << 28
#: Bytes that count for each waiting message in addition to its own, so that the number of messages is bounded, too.
WAITING_OVERHEAD = 512

_NO_ADDRESSES = bytes(16)  # an address list of no buffers


class Receiver:
    """A receiver of one stream: it takes messages in any order and delivers them in order of their sequence numbers.

    A stream is either a schema with its record batches and dictionaries, or tensors alone, which have no schema. The
    content of packed bodies is not read: only their length, and the content of address lists, is checked. A peer that
    exceeds a limit breaks the protocol.

    Args:
        max_metadata: Most bytes of the metadata of one message.
        max_waiting_bytes: Most bytes of bodies that wait for their turn, however many messages that are.
        max_waiting_metadata: Most bytes of metadata that wait for their turn.
        frees_messages: Whether bodies by address are given back by the numbers of their messages.
    """

    def __init__(
        self,
        max_metadata: int = MAX_METADATA,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        max_waiting_metadata: int = MAX_WAITING_METADATA,
        frees_messages: bool = False,
    ) -> None:
        self._machine = Machine(Side.RECEIVER)
        self._frees_messages = frees_messages
        self._max_metadata = max_metadata
        self._max_waiting_bytes = max_waiting_bytes
        self._max_waiting_metadata = max_waiting_metadata
        self._headers: dict[int, tuple[bytes, Header]] = {}
        self._bodies: dict[int, tuple[BodyKind, Buffer]] = {}
        self._runs: deque[Run] = deque()  # runs that wait to be delivered
        self._run_messages: Iterator[Incoming] = iter(
            ()
        )  # remaining messages of a run that is taken message by message
        self._remaining_messages = 0  # number of these messages
        self._waiting_bytes = 0
        self._waiting_metadata = 0  # bytes
        #: The number of the message to deliver next, not truncated to 32 bits.
        self.sequence = 0
        self._count: int | None = None  # number of messages in the stream, known from its end
        self._tensors: bool | None = None  # whether the stream has tensors, known from the first metadata to arrive
        self._schema_known = False
        self._layout: SchemaLayout | None = None  # known once the schema is delivered, if it can be read
        self._last: tuple[bytes, Header] | None = None  # the flatbuffer that was parsed last
        self._checked: bytes | None = None  # the last flatbuffer whose number of buffers was right
        self._spare_taken = False  # whether an empty body for the schema has arrived

    @classmethod
    def with_limits(cls, max_metadata: int, max_body: int, frees_messages: bool = False) -> Receiver:
        """Return a receiver of a stream that was requested already.

        Args:
            max_metadata: Most bytes of the metadata of one message. Also the most bytes of metadata that wait for their
                turn, but at least MAX_WAITING_METADATA.
            max_body: Most bytes of bodies that wait for their turn, but at least MAX_WAITING_BYTES.
            frees_messages: Whether bodies by address are given back by the numbers of their messages.
        """
        max_waiting = max(MAX_WAITING_BYTES, max_body), max(MAX_WAITING_METADATA, max_metadata)
        receiver = cls(max_metadata, *max_waiting, frees_messages)
        receiver._machine.move(Move.WANT, LocalProtocolError)
        return receiver

    @property
    def state(self) -> State:
        """Return the state of this stream."""
        return self._machine.state

    @property
    def complete(self) -> bool:
        """Return whether every message up to the end of stream has been delivered."""
        return self._machine.state in (State.COMPLETE, State.DONE) and not self._remaining_messages and not self._runs

    def want(self) -> None:
        """Record that the stream was requested."""
        self._machine.move(Move.WANT, LocalProtocolError)

    def receive(self, arrived: Incoming | Run, of_run: bool = False) -> None:
        """Take an arrived message or run.

        Args:
            arrived: The message or run.
            of_run: Whether the message is a slice of a run's memory. See `receive_body`.

        Raises:
            RemoteProtocolError: The message breaks the protocol. The messages of a run are checked later, by `next`.
        """
        if isinstance(arrived, Run):
            self._runs.append(arrived)
        elif arrived.tag is None:
            self.receive_metadata(arrived.data)
        else:
            self.receive_body(arrived.tag, arrived.data, of_run)

    def receive_metadata(self, message: bytes) -> None:
        """Take an untagged message.

        Raises:
            RemoteProtocolError: The message breaks the protocol.
        """
        kind, wire_sequence, header = parse_metadata(message)
        if kind is MetadataKind.END_OF_STREAM:
            self._machine.move(Move.END, RemoteProtocolError)
            self._end(unwrap(wire_sequence, self.sequence))
            return
        self._machine.move(Move.METADATA, RemoteProtocolError)
        if len(header) > self._max_metadata:
            raise RemoteProtocolError(
                f"the peer sent metadata of {len(header)} bytes; at most {self._max_metadata} are accepted "
                "(max_metadata)",
                rule="frame-length",
            )
        sequence = self._full_sequence(wire_sequence, self._headers, "metadata")
        if self._last is None or header != self._last[0]:
            self._last = header, parse_header(header)
        header, parsed = self._last  # batches of one size often have equal flatbuffers
        if parsed.misread:
            raise RemoteProtocolError(f"message {sequence} cannot be read: {MISREAD}", rule="metadata-message")
        if self._tensors is None:
            self._tensors = parsed.is_tensor
        if parsed.is_tensor is not self._tensors:
            raise RemoteProtocolError(
                f"message {sequence} is a {parsed.type.name}; a stream has either tensors only, or none",
                rule="tensors-alone",
            )
        if not parsed.is_tensor and (sequence == 0) is not (parsed.type is HeaderType.SCHEMA):
            raise RemoteProtocolError(
                f"message {sequence} is a {parsed.type.name}; a stream has one schema, which comes first",
                rule="schema-first",
            )
        if not parsed.has_body:
            self._schema_known = True
            if sequence in self._bodies:
                self._take_spare(*self._take_body(sequence))
        self._waiting_metadata += len(header) + WAITING_OVERHEAD
        if self._waiting_metadata > self._max_waiting_metadata and sequence != self.sequence:
            raise RemoteProtocolError(
                f"metadata of {self._waiting_metadata} bytes waits for message {self.sequence}; "
                f"the cap is {self._max_waiting_metadata} (max_metadata)",
                rule="waiting-limit",
            )
        self._headers[sequence] = header, parsed

    def receive_body(self, tag: int, body: Buffer, of_run: bool = False) -> None:
        """Take a tagged message.

        Args:
            tag: The tag.
            body: The body.
            of_run: Whether `body` is a slice of a run's memory. A body that has to wait is then copied, because it
                would keep the whole run alive, which the limits do not count.

        Raises:
            RemoteProtocolError: The message breaks the protocol.
        """
        kind, wire_sequence = parse_body_tag(tag)
        if self._schema_known and unwrap(wire_sequence, self.sequence) == 0:
            return self._take_spare(kind, body)
        self._machine.move(Move.BODY, RemoteProtocolError)
        sequence = self._full_sequence(wire_sequence, self._bodies, "body")
        self._waiting_bytes += len(body) + WAITING_OVERHEAD
        if self._waiting_bytes > self._max_waiting_bytes and sequence != self.sequence:
            raise RemoteProtocolError(
                f"bodies of {self._waiting_bytes} bytes wait for message {self.sequence}; "
                f"the cap is {self._max_waiting_bytes} (max_body)",
                rule="waiting-limit",
            )
        self._bodies[sequence] = kind, bytes(body) if of_run and sequence != self.sequence else body
        return None

    def _take_body(self, sequence: int) -> tuple[BodyKind, Buffer]:
        """Remove a waiting body and return it."""
        kind, content = self._bodies.pop(sequence)
        self._waiting_bytes -= len(content) + WAITING_OVERHEAD
        return kind, content

    def _take_spare(self, kind: BodyKind, body: Buffer) -> None:
        """Check and discard a body for the schema, which has none. Some peers send an empty one."""
        if len(body) and (kind is BodyKind.PACKED or bytes(body[: len(_NO_ADDRESSES) + 1]) != _NO_ADDRESSES):
            raise RemoteProtocolError(
                f"the peer sent a body of {len(body)} bytes for message 0, which has none", rule="schema-body"
            )
        if self._spare_taken:
            raise RemoteProtocolError("the peer sent the body of message 0 twice", rule="message-once")
        if self._machine.state is State.FAILED:
            raise RemoteProtocolError("the peer sent a body after the stream had failed", rule="schema-body")
        self._spare_taken = True

    def announced_length(self, tag: int) -> int | None:
        """Return the length that the metadata announces for the body with this tag, in bytes.

        Returns:
            The length, or None if the metadata has not arrived.
        """
        kind, wire_sequence = parse_body_tag(tag)
        metadata = self._headers.get(unwrap(wire_sequence, self.sequence))
        if metadata is None:
            return None
        parsed = metadata[1]
        return parsed.body_length if kind is BodyKind.PACKED else 16 + 16 * parsed.buffer_count

    def announced(self, tag: int) -> tuple[bytes, Header] | None:
        """Return the metadata of the packed body with this tag.

        Returns:
            The metadata, or None if it has not arrived, or if the body is an address list.
        """
        kind, wire_sequence = parse_body_tag(tag)
        return self._headers.get(unwrap(wire_sequence, self.sequence)) if kind is BodyKind.PACKED else None

    def _deliver_run(self, run: Run) -> Delivered | None:
        """Deliver all messages of a run at once, or return None if that is not possible."""
        end = self.sequence + run.length
        if (
            self._machine.state not in (State.STREAMING, State.ENDING)
            or not self.sequence
            or not self._is_new(run.length)
        ):
            return None
        batches = recognize(run, self.sequence, self._frees_messages)
        if batches is not None:
            self._check_buffers(batches.headers[0].tobytes(), batches.parsed, self.sequence)
            self.sequence = end
            if end == self._count:
                self._machine.move(Move.DELIVERED, RemoteProtocolError)
        return batches

    def _is_new(self, length: int) -> bool:
        """Return whether the next `length` messages belong to the stream and have not begun to arrive."""
        end = self.sequence + length
        if self._count is not None and end > self._count:
            return False
        numbers = range(self.sequence, end)
        return all(not arrived or arrived.keys().isdisjoint(numbers) for arrived in (self._headers, self._bodies))

    @property
    def needs_body(self) -> bool:
        """Return whether the next message lacks its body only. If not, it lacks its metadata."""
        return self.sequence in self._headers

    def next_together(self) -> Delivered | None:
        """Return the next message, together with messages after it that came in the same run and are certainly valid.

        Returns:
            The messages, or None if the next message is incomplete.

        Raises:
            RemoteProtocolError: A message breaks the protocol.
        """
        if self._runs and not self._remaining_messages and (batches := self._deliver_run(self._runs[0])) is not None:
            self._runs.popleft()
            return batches
        return self.next()

    def next(self) -> Delivery | None:
        """Return the next message in order, or None if it is incomplete.

        Raises:
            RemoteProtocolError: A message breaks the protocol.
        """
        while (delivery := self._deliver()) is None and (self._remaining_messages or self._runs):
            if not self._remaining_messages:
                run = self._runs.popleft()
                self._run_messages, self._remaining_messages = run.expand(), 2 * run.length
            self._remaining_messages -= 1
            message = next(self._run_messages)
            if not self._remaining_messages:
                self._run_messages = iter(())  # drop the reference to the run's memory
            self.receive(message, of_run=True)
        return delivery

    def _deliver(self) -> Delivery | None:
        sequence = self.sequence
        metadata = self._headers.get(sequence)
        if metadata is None:
            return None
        header, parsed = metadata
        body: Buffer | None = None
        addresses: AddressList | None = None
        if parsed.has_body:
            if sequence not in self._bodies:
                return None
            kind, content = self._take_body(sequence)
            if kind is BodyKind.ADDRESSES:
                addresses = parse_addresses(content, parsed.body_length)
                _check_address_list(addresses, header, parsed, sequence)
            elif len(content) == parsed.body_length:
                body = content
            else:
                raise RemoteProtocolError(
                    f"the body of message {sequence} has {len(content)} bytes; "
                    f"its metadata announced {parsed.body_length}",
                    rule="body-length",
                )
        self._check_buffers(header, parsed, sequence)
        del self._headers[sequence]
        self._waiting_metadata -= len(header) + WAITING_OVERHEAD
        self.sequence = sequence + 1
        if self.sequence == self._count:
            self._machine.move(Move.DELIVERED, RemoteProtocolError)
        return Delivery(sequence, header, parsed, body, addresses, self._frees_messages)

    def _check_buffers(self, header: bytes, parsed: Header, sequence: int) -> None:
        """Check that the next message has as many buffers as the schema needs. libarrow ignores surplus buffers."""
        if parsed.type is HeaderType.SCHEMA:
            self._layout = layout_of(header)
        elif header is not self._checked and self._layout is not None and not parsed.is_tensor:
            try:
                needed = self._layout.buffers_of(header, parsed)
            except (struct.error, IndexError):
                return  # libarrow reports the damage
            if needed is not None and needed != parsed.buffer_count:
                raise RemoteProtocolError(
                    f"message {sequence} has {parsed.buffer_count} buffers; its schema needs {needed}; a peer that "
                    "sends buffers of earlier messages again, as the C++ example does, causes this",
                    rule="buffer-count",
                )
            self._checked = header

    def disconnected(self) -> None:
        """Handle that the peer has disconnected.

        Raises:
            RemoteProtocolError: The stream is incomplete. The message names the gap.
        """
        if self.complete:
            return
        numbers = sorted(self._headers.keys() | self._bodies.keys())
        newest = f"; messages up to {numbers[-1]} had begun to arrive" if numbers else ""
        expected = "" if self._count is None else f" of {self._count}"
        raise RemoteProtocolError(
            f"the peer closed the stream before its end: message {self.sequence}{expected} is missing{newest}",
            rule="stream-whole",
        )

    def fail(self) -> None:
        """Record that the stream failed before its end."""
        self._machine.move(Move.FAIL, LocalProtocolError)

    def _full_sequence(self, wire_sequence: int, arrived: Container[int], part: str) -> int:
        """Return the full sequence number of a message, which must be new and must not lie beyond the stream's end."""
        following = self.sequence
        if following & SEQUENCE_MASK == wire_sequence and following not in arrived:
            sequence = following
        else:
            sequence = unwrap(wire_sequence, following)
            if sequence < following or sequence in arrived:
                raise RemoteProtocolError(
                    f"the peer sent the {part} of message {wire_sequence} twice", rule="message-once"
                )
        if self._count is not None and sequence >= self._count:
            raise RemoteProtocolError(
                f"the peer sent the {part} of message {sequence} after it ended the stream at {self._count} messages",
                rule="end-count",
            )
        return sequence

    def _end(self, count: int) -> None:
        last = max((*self._headers, *self._bodies), default=self.sequence - 1)
        if count <= last:
            raise RemoteProtocolError(
                f"the peer ended the stream at {count} messages, but has sent message {last}", rule="end-count"
            )
        if count == 0:
            raise RemoteProtocolError("the peer ended the stream before its first message", rule="end-count")
        self._count = count
        if self.sequence == count:
            self._machine.move(Move.DELIVERED, RemoteProtocolError)


def _check_address_list(address_list: AddressList, header: bytes, parsed: Header, sequence: int) -> None:
    _, lengths = buffer_extents(header, parsed)
    if len(address_list.lengths) != len(lengths):
        raise RemoteProtocolError(
            f"the address list of message {sequence} has {len(address_list.lengths)} buffers; "
            f"its metadata announced {len(lengths)}",
            rule="list-count",
        )
    for index, (length, announced) in enumerate(zip(address_list.lengths, lengths, strict=True)):
        if length != announced:
            raise RemoteProtocolError(
                f"the address list of message {sequence} gives {length} bytes to buffer {index}; its metadata "
                f"announced {announced}",
                rule="list-lengths",
            )
