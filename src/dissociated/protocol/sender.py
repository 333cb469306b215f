"""The server's role in a stream ("Server Sequence"): numbers messages, and interprets those of the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.protocol.request import Request
from dissociated.protocol.run import encode
from dissociated.protocol.states import Machine, Move, Side, State
from dissociated.protocol.wire import BodyKind, Streams, body_tag, encode_end_of_stream, encode_prefix, parse_free


@dataclass(frozen=True)
class Tags:
    """The tags that a server has chosen, and that its URIs tell its clients.

    `want` maps each want_data tag to the streams that it requests. `free_data` is None if no addresses are sent.
    """

    want: Mapping[int, Streams]
    free_data: int | None = None


class StreamRequested(NamedTuple):
    """A client sent want_data: "an opaque binary identifier of the data stream being requested"."""

    request: Request
    streams: Streams
    tag: int


class MemoryFreed(NamedTuple):
    """A client sent free_data: it no longer needs the memory at these addresses, or of the messages with these numbers.

    An address that was sent twice is freed twice.
    """

    freed: tuple[int, ...]


class Body(NamedTuple):
    """A body to be sent: its bytes in parts, packed or an address list."""

    kind: BodyKind
    parts: Sequence[Buffer]


def _encode(sequence: int, header: bytes, body: Body | None, streams: Streams) -> list[Message]:
    """Return the messages that carry IPC message number `sequence` on a connection with these `streams`."""
    if streams is Streams.BOTH and body is not None:  # the common case, without the slow operations on flags
        return [
            Message(None, (encode_prefix(sequence), header)),
            Message(body_tag(body.kind, sequence), body.parts),
        ]
    messages = []
    if streams & Streams.METADATA:
        messages.append(Message(None, (encode_prefix(sequence), header)))
    if streams & Streams.BODIES and body is not None:
        messages.append(Message(body_tag(body.kind, sequence), body.parts))
    return messages


class Sender:
    """A sender of one stream: numbers its messages and interprets the client's. It neither moves nor holds bytes."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._machine = Machine(Side.SENDER)
        #: The streams that the client has requested; both before its request.
        self.streams = Streams.BOTH
        #: The number of the next message, not truncated to 32 bits.
        self.sequence = 0

    @classmethod
    def before_request(cls, streams: Streams, first: int = 0) -> Sender:
        """Return the sender of a stream before a client requests it, whose next message has the number `first`.

        Its messages are sent to every client that requests the stream. See `record_sent`.
        """
        sender = cls(Tags({}))
        sender.sequence = first
        sender._machine.move(Move.WANT, LocalProtocolError)
        sender.streams = streams
        return sender

    @property
    def state(self) -> State:
        """Return the state of this stream."""
        return self._machine.state

    def receive(self, arrived: Incoming | Run) -> StreamRequested | MemoryFreed:
        """Interpret a message of the client.

        Raises:
            RemoteProtocolError: The message is invalid, or not allowed in this state.
        """
        if isinstance(arrived, Run):
            raise RemoteProtocolError(
                "the client sent a run of messages, which only servers may send", rule="client-frames"
            )
        tag, body = arrived.tag, bytes(arrived.data)
        if tag is None:
            raise RemoteProtocolError(
                "the client sent an untagged message; clients may send only want_data and free_data",
                rule="client-frames",
            )
        streams = self._tags.want.get(tag)
        if streams is not None:
            if self.state is not State.IDLE:
                raise RemoteProtocolError(
                    "the client requested a second stream (want_data) on a connection that is not free for it: set "
                    "keep in the first request, and wait until that stream has ended and all of its memory was freed; "
                    "or open another connection",
                    rule="request-once",
                )
            self._machine.move(Move.WANT, RemoteProtocolError)
            request = Request.parse(body)
            self.streams = streams if request.streams is None else request.streams
            if self.streams not in streams:
                raise RemoteProtocolError(
                    "the client requested a stream that its want_data value does not request", rule="request-members"
                )
            return StreamRequested(request, self.streams, tag)
        if tag == self._tags.free_data:
            self._machine.move(Move.FREE, RemoteProtocolError)
            return MemoryFreed(parse_free(body))
        raise RemoteProtocolError(f"the client sent a message with the unknown tag {tag:#018x}", rule="client-tags")

    def send(self, header: bytes, body: Body | None) -> list[Message]:
        """Return the messages to send on this connection for the next IPC message of the stream.

        Raises:
            LocalProtocolError: The stream is not running.
        """
        self._machine.move(Move.METADATA, LocalProtocolError)
        messages = _encode(self.sequence, header, body, self.streams)
        self.sequence += 1
        return messages

    def send_alike(self, header: bytes, bodies: Sequence[Buffer]) -> Run:
        """Return a run of IPC messages that share this flatbuffer, one for each of the packed bodies of equal length.

        Raises:
            LocalProtocolError: The stream is not running.
        """
        self._machine.move(Move.METADATA, LocalProtocolError)
        first, self.sequence = self.sequence, self.sequence + len(bodies)
        return encode(first, header, bodies)

    def record_sent(self, first: int, count: int) -> None:
        """Record that `count` messages were sent that a sender made by `before_request` has numbered from `first` on.

        Raises:
            LocalProtocolError: `first` is not the next number.
        """
        if first != self.sequence:
            raise LocalProtocolError(f"messages from number {first} on were sent; number {self.sequence} comes next")
        self._machine.move(Move.METADATA, LocalProtocolError)
        self.sequence += count

    def end(self) -> list[Message]:
        """Return the messages of the end of stream. No message may be sent after them.

        Raises:
            LocalProtocolError: The stream has no message yet.
        """
        if self.state is State.STREAMING and not self.sequence:
            raise LocalProtocolError("a stream cannot end before its first message")
        self._machine.move(Move.END, LocalProtocolError)
        if not self.streams & Streams.METADATA:
            return []
        return [Message(None, (encode_end_of_stream(self.sequence),))]

    def drained(self) -> None:
        """Record that every address that was sent has been freed: "the work for this stream is complete"."""
        self._machine.move(Move.DRAINED, LocalProtocolError)

    def fail(self) -> None:
        """Record that the stream failed before its end."""
        self._machine.move(Move.FAIL, LocalProtocolError)
