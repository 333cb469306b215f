from __future__ import annotations

import pytest

from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.request import Request
from dissociated.protocol.sender import Body, MemoryFreed, Sender, StreamRequested, Tags
from dissociated.protocol.states import State
from dissociated.protocol.wire import BodyKind, Streams

from .steps import check_steps
from .wire import joined, uint64s

WANT, WANT_METADATA, WANT_BODIES, FREE = 0xADBA0BAB0, 0xFFFFFDEADBA0BAB0, 0x00000DEADBA0BAB0, 99
TAGS = Tags(want={WANT: Streams.BOTH, WANT_METADATA: Streams.METADATA, WANT_BODIES: Streams.BODIES}, free_data=FREE)
SCHEMA, BATCH = b"<schema>", b"<batch>"


def on_the_wire(messages) -> list[tuple[int | None, bytes]]:
    return [(message.tag, joined(message.parts)) for message in messages]


def sender(state: State = State.STREAMING) -> Sender:
    """Return a sender in this state. After IDLE it has sent its schema."""
    made = Sender(TAGS)
    if state is State.IDLE:
        return made
    made.receive(Incoming(WANT, b"ticket"))
    made.send(SCHEMA, None)
    if state is State.FAILED:
        made.fail()
    if state in (State.ENDING, State.DONE):
        made.end()
    if state is State.DONE:
        made.drained()
    assert made.state is state
    return made


class TestWhatTheClientSends:
    @pytest.mark.parametrize(
        ("tag", "streams"),
        [(WANT, Streams.BOTH), (WANT_METADATA, Streams.METADATA), (WANT_BODIES, Streams.BODIES)],
    )
    def test_want_data_names_a_stream_and_by_its_value_the_streams_wanted(self, tag, streams):
        requested = Sender(TAGS)
        assert requested.receive(Incoming(tag, b"\x00opaque\xff")) == StreamRequested(
            Request(b"\x00opaque\xff"), streams, tag
        )
        assert requested.state is State.STREAMING
        assert requested.streams is streams

    def test_free_data_gives_addresses_back(self):
        assert sender().receive(Incoming(FREE, uint64s(64, 128, 64))) == MemoryFreed((64, 128, 64))

    def test_free_data_is_understood_after_the_end_of_stream(self):
        assert sender(State.ENDING).receive(Incoming(FREE, uint64s(64))) == MemoryFreed((64,))

    @pytest.mark.parametrize("body", [b"", bytes(7), bytes(9)])
    def test_free_data_that_is_no_list_of_uint64_is_refused(self, body):
        with pytest.raises(RemoteProtocolError, match="free_data"):
            sender().receive(Incoming(FREE, body))

    def test_free_data_before_want_data_is_refused(self):
        with pytest.raises(RemoteProtocolError, match="free_data is not allowed"):
            Sender(TAGS).receive(Incoming(FREE, uint64s(64)))

    def test_a_second_want_data_is_refused(self):
        with pytest.raises(RemoteProtocolError, match="a second stream"):
            sender().receive(Incoming(WANT, b"another"))

    @pytest.mark.parametrize("state", [State.IDLE, State.STREAMING, State.ENDING])
    def test_an_untagged_message_is_refused(self, state):
        with pytest.raises(RemoteProtocolError, match="untagged"):
            sender(state).receive(Incoming(None, b"\x01\x00\x00\x00\x00"))

    @pytest.mark.parametrize("state", [State.IDLE, State.STREAMING, State.ENDING])
    def test_a_run_is_refused(self, state):
        run = Run(1, memoryview(bytes(5)), 5, memoryview(FREE.to_bytes(8, "little")), memoryview(uint64s(64)), 8)
        with pytest.raises(RemoteProtocolError, match="which only servers may send"):
            sender(state).receive(run)

    @pytest.mark.parametrize("state", [State.IDLE, State.STREAMING, State.ENDING])
    def test_an_unknown_tag_is_refused_and_shown(self, state):
        with pytest.raises(RemoteProtocolError, match="unknown tag 0x00000000000000ff"):
            sender(state).receive(Incoming(0xFF, b""))

    def test_free_data_is_an_unknown_tag_where_no_addresses_are_sent(self):
        requested = Sender(Tags(want={WANT: Streams.BOTH}))
        requested.receive(Incoming(WANT, b"ticket"))
        with pytest.raises(RemoteProtocolError, match="unknown tag"):
            requested.receive(Incoming(FREE, uint64s(64)))


class TestWhatTheServerSends:
    def test_a_whole_stream_on_one_connection(self):
        sending = Sender(TAGS)
        sending.receive(Incoming(WANT, b"ticket"))
        messages = [
            *sending.send(SCHEMA, None),
            *sending.send(BATCH, Body(BodyKind.PACKED, [b"12345678", b"", b"abcdefgh"])),
            *sending.send(BATCH, Body(BodyKind.ADDRESSES, [uint64s(5, 1, 64, 5)])),
            *sending.send(BATCH, Body(BodyKind.PACKED, [])),
            *sending.end(),
        ]
        assert on_the_wire(messages) == [
            (None, b"\x01\x00\x00\x00\x00<schema>"),
            (None, b"\x01\x01\x00\x00\x00<batch>"),
            (0x0000000000000001, b"12345678abcdefgh"),
            (None, b"\x01\x02\x00\x00\x00<batch>"),
            (
                0x0100000000000002,
                bytes.fromhex("0500000000000000 01" + "00" * 7 + "40" + "00" * 7 + "05") + bytes(7),
            ),
            (None, b"\x01\x03\x00\x00\x00<batch>"),
            (0x0000000000000003, b""),  # an empty batch has a body, too
            (None, b"\x00\x04\x00\x00\x00"),
        ]
        sending.drained()
        assert sending.state is State.DONE

    def test_on_two_connections_both_number_alike_and_only_the_metadata_ends(self):
        def stream(tag):
            sending = Sender(TAGS)
            sending.receive(Incoming(tag, b"ticket"))
            body = Body(BodyKind.PACKED, [b"body"])
            return on_the_wire(
                [
                    *sending.send(SCHEMA, None),
                    *sending.send(BATCH, None),
                    *sending.send(BATCH, body),
                    *sending.end(),
                ]
            )

        assert stream(WANT_METADATA) == [
            (None, b"\x01\x00\x00\x00\x00<schema>"),
            (None, b"\x01\x01\x00\x00\x00<batch>"),
            (None, b"\x01\x02\x00\x00\x00<batch>"),
            (None, b"\x00\x03\x00\x00\x00"),
        ]
        assert stream(WANT_BODIES) == [(2, b"body")]

    def test_numbers_roll_over_on_the_wire(self):
        sending = sender()
        sending.sequence = 0xFFFFFFFF
        body = Body(BodyKind.ADDRESSES, [uint64s(0, 0)])
        assert on_the_wire([*sending.send(BATCH, body), *sending.send(BATCH, body), *sending.end()]) == [
            (None, b"\x01\xff\xff\xff\xff<batch>"),
            (0x01000000FFFFFFFF, bytes(16)),
            (None, b"\x01\x00\x00\x00\x00<batch>"),
            (0x0100000000000000, bytes(16)),
            (None, b"\x00\x01\x00\x00\x00"),
        ]

    def test_headers_and_bodies_are_handed_on_as_they_are_never_joined(self):
        parts = [bytearray(b"1234"), memoryview(b"5678")]
        metadata, body = sender().send(BATCH, Body(BodyKind.PACKED, parts))
        assert metadata.parts[1] is BATCH
        assert body.parts is parts

    def test_messages_encoded_beforehand_count(self):
        sending = sender()
        sending.record_sent(1, 3)
        assert on_the_wire(sending.send(BATCH, None)) == [(None, b"\x01\x04\x00\x00\x00<batch>")]
        sending.record_sent(5, 2)
        assert on_the_wire(sending.end()) == [(None, b"\x00\x07\x00\x00\x00")]

    def test_a_stream_has_at_least_one_message(self):
        sending = Sender(TAGS)
        sending.receive(Incoming(WANT, b"ticket"))
        with pytest.raises(LocalProtocolError, match="first message"):
            sending.end()
        assert sending.state is State.STREAMING

    def test_what_was_encoded_beforehand_goes_where_it_belongs_alone(self):
        sending = sender()
        with pytest.raises(LocalProtocolError, match="from number 3 on were sent; number 1 comes next"):
            sending.record_sent(3, 2)
        assert sending.sequence == 1

    @pytest.mark.parametrize("streams", Streams.__members__.values())
    def test_a_stream_is_numbered_ahead_as_it_is_when_it_has_been_asked_for(self, streams):
        def stream(sending):
            return on_the_wire(
                [*sending.send(SCHEMA, None), *sending.send(BATCH, Body(BodyKind.PACKED, [b"body"])), *sending.end()]
            )

        requested = Sender(TAGS)
        requested.receive(Incoming(next(tag for tag, wanted in TAGS.want.items() if wanted is streams), b"ticket"))
        assert stream(Sender.before_request(streams)) == stream(requested)


THEIRS = {
    "want_data": lambda sending: sending.receive(Incoming(WANT, b"ticket")),
    "free_data": lambda sending: sending.receive(Incoming(FREE, uint64s(64))),
}
OURS = {
    "send": lambda sending: sending.send(BATCH, None),
    "record_sent": lambda sending: sending.record_sent(sending.sequence, 2),
    "end": lambda sending: sending.end(),
    "drained": lambda sending: sending.drained(),
    "fail": lambda sending: sending.fail(),
}
ALLOWED = {
    State.IDLE: {"want_data": State.STREAMING, "fail": State.FAILED},
    State.STREAMING: {
        "free_data": State.STREAMING,
        "send": State.STREAMING,
        "record_sent": State.STREAMING,
        "end": State.ENDING,
        "fail": State.FAILED,
    },
    State.ENDING: {"free_data": State.ENDING, "drained": State.DONE, "fail": State.FAILED},
    State.DONE: {},
    State.FAILED: {"free_data": State.FAILED, "fail": State.FAILED},  # addresses are still accepted
}


def test_every_step_in_every_state_is_allowed_or_the_fault_of_whoever_took_it():
    check_steps(sender, ALLOWED, THEIRS, OURS)


def test_what_is_alike_may_be_sent_in_one_run() -> None:
    one, other = sender(), sender()
    for sequence in (one.sequence, 2**32 - 3):
        one.sequence = other.sequence = sequence
        bodies = [bytes([number]) * 8 for number in range(9)]
        run = one.send_alike(BATCH, bodies)
        each = [message for body in bodies for message in other.send(BATCH, Body(BodyKind.PACKED, [body]))]
        assert [(tag, bytes(data)) for tag, data in run.expand()] == on_the_wire(each)
        assert one.sequence == other.sequence
