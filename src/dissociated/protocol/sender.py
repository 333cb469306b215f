"""The server's role in one stream ("Server Sequence")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.bodies import parse_free
from dissociated.protocol.events import AddressesFreed, StreamRequested, Streams
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.protocol.metadata import encode_end_of_stream, encode_prefix
from dissociated.protocol.run import encode
from dissociated.protocol.states import Machine, Role, State, Step
from dissociated.protocol.tags import BodyKind, body_tag


@dataclass(frozen=True)
class Tags:
    """The tags a server chose for itself and told its clients by URI.

    `want` maps each want_data value to the streams it asks for; `free_data` is None where no addresses are sent.
    """

    want: Mapping[int, Streams]
    free_data: int | None = None


class Body(NamedTuple):
    """A body about to be sent: its bytes, packed or an address list, in parts."""

    kind: BodyKind
    parts: Sequence[Buffer]


def _encode(sequence: int, header: bytes, body: Body | None, streams: Streams) -> list[Message]:
    """The messages that carry IPC message number `sequence` on a connection with these `streams`."""
    if streams is Streams.BOTH and body is not None:  # nearly always: flags are slow
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
    """Numbers messages, and says what the peer's messages mean. Moves no bytes and holds none."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._machine = Machine(Role.SENDER)
        #: Which streams the client has asked for; both until it has.
        self.streams = Streams.BOTH
        #: The number of the next message, not truncated to 32 bits.
        self.sequence = 0

    @classmethod
    def ahead(cls, streams: Streams, first: int = 0) -> Sender:
        """One of a stream that nobody has asked for yet, whose next message is number `first`.

        What it makes is sent to whoever does ask, see `sent`.
        """
        sender = cls(Tags({}))
        sender.sequence = first
        sender._machine.move(Step.WANT, LocalProtocolError)
        sender.streams = streams
        return sender

    @property
    def state(self) -> State:
        """Where this stream is."""
        return self._machine.state

    def receive(self, arrived: Incoming | Run) -> StreamRequested | AddressesFreed:
        """What a message of the client means. Raises RemoteProtocolError where it means nothing, or not now."""
        if isinstance(arrived, Run):
            raise RemoteProtocolError("the client sent a run of messages, which only servers do")
        tag, body = arrived.tag, bytes(arrived.data)
        if tag is None:
            raise RemoteProtocolError("the client sent an untagged message; clients send want_data and free_data only")
        streams = self._tags.want.get(tag)
        if streams is not None:
            if self.state is not State.IDLE:
                raise RemoteProtocolError(
                    "the client asked for a second stream (want_data) on a connection, which carries one: "
                    "open another connection"
                )
            self._machine.move(Step.WANT, RemoteProtocolError)
            self.streams = streams
            return StreamRequested(body, streams, tag)
        if tag == self._tags.free_data:
            self._machine.move(Step.FREE, RemoteProtocolError)
            return AddressesFreed(parse_free(body))
        raise RemoteProtocolError(f"the client sent a message with the unknown tag {tag:#018x}")

    def send(self, header: bytes, body: Body | None) -> list[Message]:
        """The messages for the next IPC message of the stream, on this connection. Raises LocalProtocolError."""
        self._machine.move(Step.METADATA, LocalProtocolError)
        messages = _encode(self.sequence, header, body, self.streams)
        self.sequence += 1
        return messages

    def send_alike(self, header: bytes, bodies: Sequence[Buffer]) -> Run:
        """The messages for as many IPC messages with this flatbuffer, their packed bodies of one length."""
        self._machine.move(Step.METADATA, LocalProtocolError)
        first, self.sequence = self.sequence, self.sequence + len(bodies)
        return encode(first, header, bodies)

    def sent(self, first: int, count: int) -> None:
        """The next `count` messages went out: those that a sender which was `ahead` numbered from `first` on.

        Raises LocalProtocolError where another number was due.
        """
        if first != self.sequence:
            raise LocalProtocolError(f"messages numbered from {first} on went out where {self.sequence} was due")
        self._machine.move(Step.METADATA, LocalProtocolError)
        self.sequence += count

    def end(self) -> list[Message]:
        """The messages of the end of stream. Nothing may be sent after them.

        Raises LocalProtocolError before the first message.
        """
        if self.state is State.STREAMING and not self.sequence:
            raise LocalProtocolError("a stream cannot end before its first message")
        self._machine.move(Step.END, LocalProtocolError)
        if not self.streams & Streams.METADATA:
            return []
        return [Message(None, (encode_end_of_stream(self.sequence),))]

    def drained(self) -> None:
        """Every address that was sent has been freed: "the work for this stream is complete"."""
        self._machine.move(Step.DRAINED, LocalProtocolError)

    def fail(self) -> None:
        """The stream is over before its end."""
        self._machine.move(Step.FAIL, LocalProtocolError)
