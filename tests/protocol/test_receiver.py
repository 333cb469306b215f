"""The receiver delivers each message once, in order and with its own body, for any order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dissociated.errors import RemoteProtocolError
from dissociated.format.message import HeaderType
from dissociated.protocol.delivery import Delivery
from dissociated.protocol.message import Incoming
from dissociated.protocol.receiver import Receiver
from dissociated.protocol.request import Request
from dissociated.protocol.sender import Body, Sender, StreamRequested, Tags
from dissociated.protocol.states import State
from dissociated.protocol.wire import AddressList, BodyKind, Streams

from .steps import check_steps
from .wire import (
    Encoded,
    address_list,
    encode,
    encode_tensor,
    end_of_stream,
    golden_tensor,
    joined,
    metadata,
    tag,
    uint64s,
)

# A batch with the same number of buffers as NUMBERS.
DICTIONARY = pa.record_batch({"d": pa.array(["x", "yy", "x"]).dictionary_encode()})
EMPTY = pa.record_batch({"n": pa.array([], pa.int64())})
NUMBERS = pa.record_batch({"n": [1, 2, 3, 4]})  # buffers: no validity bitmap, 32 bytes of values
ROLLS_OVER_AFTER_3 = 2**32 - 3

SCHEMA, BATCH = encode(NUMBERS)
_, EMPTY_BATCH = encode(EMPTY)
_, DICTIONARY_BATCH, INDICES = encode(DICTIONARY)
TENSOR = encode_tensor(pa.Tensor.from_numpy(NUMBERS.column(0).to_numpy()))
SPARSE = golden_tensor("csr_int32")


class Form(NamedTuple):
    """An IPC message with its body in one of the two forms, and the result of the receiver."""

    message: Encoded
    kind: int
    sent: bytes
    delivered: bytes | AddressList


def packed(message: Encoded) -> Form:
    assert message.body is not None
    return Form(message, 0, message.body, message.body)


# Buffer lengths are literals: an address list must agree with its metadata.
FORMS = [
    packed(BATCH),
    Form(BATCH, 1, address_list((0, 0), (4096, 32)), AddressList((0, 4096), (0, 32))),
    Form(EMPTY_BATCH, 0, b"", b""),
    Form(EMPTY_BATCH, 1, address_list((0, 0), (0, 0)), AddressList((0, 0), (0, 0))),
    packed(DICTIONARY_BATCH),
    Form(
        DICTIONARY_BATCH,
        1,
        address_list((0, 0), (64, 12), (128, 3)),
        AddressList((0, 64, 128), (0, 12, 3)),
    ),
    packed(INDICES),
]
TENSOR_FORMS = [
    packed(TENSOR),
    Form(TENSOR, 1, address_list((2**40, 32)), AddressList((2**40,), (32,))),
    packed(SPARSE),
    Form(
        SPARSE,
        1,
        address_list((2**40, 24), (8, 24), (64, 40)),
        AddressList((2**40, 8, 64), (24, 24, 40)),
    ),
]
PACKED, LISTED, EMPTY_PACKED = FORMS[:3]


def receiver(next_: int = 0, *, schema: bool = False, **caps: Any) -> Receiver:
    """Return a receiver of a stream that waits for message `next_`, or that has just received the schema."""
    made = Receiver(**caps)
    made.want()
    made.sequence = next_
    if schema:
        made.receive_metadata(metadata(0, SCHEMA.header))
        assert made.next() is not None
    return made


def following(receiving: Receiver) -> Delivery:
    """Return the next message. Fail if it cannot be delivered yet."""
    delivery = receiving.next()
    assert delivery is not None
    return delivery


def receive(receiving: Receiver, sequence: int, form: Form) -> None:
    receiving.receive_metadata(metadata(sequence, form.message.header))
    receiving.receive_body(tag(sequence, form.kind), form.sent)


def take(receiving: Receiver) -> list[Delivery]:
    """Return every message that can be delivered now."""
    return list(iter(receiving.next, None))


def body(delivery: Delivery) -> object:
    """Return the body in the form in which it arrived."""
    return delivery.body if delivery.addresses is None else delivery.addresses


def seen(deliveries: list[Delivery]) -> list[tuple]:
    return [(delivery.sequence, delivery.header, body(delivery)) for delivery in deliveries]


class TestOrder:
    def test_in_order(self):
        receiving = receiver()
        receiving.receive_metadata(bytes.fromhex("01 00000000") + SCHEMA.header)
        receiving.receive_metadata(bytes.fromhex("01 01000000") + BATCH.header)
        receiving.receive_body(0x0000000000000001, BATCH.body)
        receiving.receive_metadata(bytes.fromhex("01 02000000") + BATCH.header)
        receiving.receive_body(0x0100000000000002, LISTED.sent)
        receiving.receive_metadata(bytes.fromhex("00 03000000"))
        schema, packed, listed = take(receiving)
        assert (schema.sequence, schema.header, schema.body) == (0, SCHEMA.header, None)
        assert schema.parsed.type is HeaderType.SCHEMA
        assert (packed.sequence, packed.header, packed.body) == (1, BATCH.header, BATCH.body)
        assert (listed.sequence, listed.header, listed.addresses) == (2, BATCH.header, LISTED.delivered)
        assert receiving.complete

    def test_every_order_of_arrival_of_a_small_stream(self):
        arrivals: list[Callable[[Receiver], None]] = [
            lambda r: r.receive_metadata(metadata(0, SCHEMA.header)),
            lambda r: r.receive_metadata(metadata(1, EMPTY_BATCH.header)),
            lambda r: r.receive_metadata(metadata(2, BATCH.header)),
            lambda r: r.receive_body(tag(1), b""),
            lambda r: r.receive_body(tag(2, kind=1), LISTED.sent),
            lambda r: r.receive_metadata(end_of_stream(3)),
        ]
        expected = [
            (0, SCHEMA.header, None),
            (1, EMPTY_BATCH.header, b""),
            (2, BATCH.header, LISTED.delivered),
        ]
        for order in permutations(arrivals):
            receiving, delivered = receiver(), []
            for arrival in order:
                assert not receiving.complete
                arrival(receiving)
                delivered += take(receiving)
            assert seen(delivered) == expected
            assert receiving.complete

    def test_a_body_is_handed_on_as_the_transport_delivered_it(self):
        receiving, body = receiver(schema=True), memoryview(bytearray(PACKED.sent))
        receiving.receive_metadata(metadata(1, BATCH.header))
        receiving.receive_body(tag(1), body)
        assert following(receiving).body is body

    def test_an_empty_batch_is_not_delivered_without_its_body_message(self):
        receiving = receiver(schema=True)
        receiving.receive_metadata(metadata(1, EMPTY_BATCH.header))
        receiving.receive_metadata(end_of_stream(2))
        assert receiving.next() is None
        assert not receiving.complete
        receiving.receive_body(tag(1), b"")
        assert following(receiving).body == b""
        assert receiving.complete

    def test_what_the_next_message_waits_for_is_known(self):
        receiving = receiver(schema=True)
        assert not receiving.needs_body  # Nothing has arrived.
        receiving.receive_body(tag(1), BATCH.body)
        assert not receiving.needs_body  # Its metadata is missing.
        receiving.receive_metadata(metadata(1, BATCH.header))
        take(receiving)
        receiving.receive_metadata(metadata(3, BATCH.header))
        assert not receiving.needs_body  # Message 2 is missing.
        receiving.receive_metadata(metadata(2, BATCH.header))
        assert receiving.next() is None
        assert receiving.needs_body

    def test_a_stream_of_a_schema_alone(self):
        receiving = receiver(schema=True)
        receiving.receive_metadata(end_of_stream(1))
        assert receiving.complete
        assert receiving.next() is None


class TestRollOver:
    def test_numbers_roll_over(self):
        receiving = receiver(ROLLS_OVER_AFTER_3)
        for wire_number in ("fdffffff", "feffffff", "ffffffff", "00000000", "01000000"):
            receiving.receive_metadata(bytes.fromhex("01" + wire_number) + BATCH.header)
            receiving.receive_body(int.from_bytes(bytes.fromhex(wire_number), "little"), BATCH.body)
        receiving.receive_metadata(bytes.fromhex("00 02000000"))
        assert [delivery.sequence for delivery in take(receiving)] == [2**32 + n for n in range(-3, 2)]
        assert receiving.complete

    def test_a_stream_may_end_at_the_roll_over(self):
        receiving = receiver(2**32 - 1)
        receiving.receive_metadata(bytes.fromhex("00 00000000"))
        receive(receiving, 0xFFFFFFFF, PACKED)
        assert len(take(receiving)) == 1
        assert receiving.complete

    def test_what_comes_after_the_roll_over_may_come_first(self):
        receiving = receiver(2**32 - 1)
        receive(receiving, 0, LISTED)
        assert receiving.next() is None
        receive(receiving, 0xFFFFFFFF, PACKED)
        assert [body(delivery) for delivery in take(receiving)] == [BATCH.body, LISTED.delivered]

    def test_number_0_is_no_schema_the_second_time(self):
        with pytest.raises(RemoteProtocolError, match="one schema"):
            receiver(2**32).receive_metadata(metadata(0, SCHEMA.header))

    def test_what_was_delivered_before_the_roll_over_is_a_duplicate_after_it(self):
        with pytest.raises(RemoteProtocolError, match="twice"):
            receiver(2**32 + 1).receive_body(tag(0xFFFFFFFF), b"")


class TestSchema:
    @pytest.mark.parametrize("form", [PACKED, Form(DICTIONARY_BATCH, 0, b"", b"")])
    def test_the_first_message_is_a_schema(self, form):
        with pytest.raises(RemoteProtocolError, match="message 0 is a"):
            receiver().receive_metadata(metadata(0, form.message.header))

    def test_there_is_one_schema(self):
        with pytest.raises(RemoteProtocolError, match="one schema"):
            receiver().receive_metadata(metadata(1, SCHEMA.header))

    @pytest.mark.parametrize("form", TENSOR_FORMS)
    def test_tensors_need_none(self, form):
        receiving = receiver()
        for sequence in (1, 0):
            receive(receiving, sequence, form)
        receiving.receive_metadata(end_of_stream(2))
        assert seen(take(receiving)) == [(number, form.message.header, form.delivered) for number in (0, 1)]
        assert receiving.complete

    @pytest.mark.parametrize("order", [*permutations([(0, SCHEMA), (1, BATCH), (2, TENSOR)])])
    def test_a_stream_is_all_tensors_or_has_none(self, order):
        receiving = receiver()

        def arrive() -> None:
            for sequence, message in order:
                receiving.receive_metadata(metadata(sequence, message.header))

        with pytest.raises(RemoteProtocolError, match="either tensors only, or none"):
            arrive()

    @pytest.mark.parametrize("first", ["metadata", "body", "delivery", "completion"])
    def test_a_schema_has_no_body_but_an_empty_one_is_passed_over(self, first):
        for kind, body, passes in ((0, b"", True), (1, b"", True), (1, bytes(16), True), (0, bytes(8), False)):
            receiving = receiver()

            def schema(receiving=receiving):
                receiving.receive_metadata(metadata(0, SCHEMA.header))
                if first == "completion":
                    receiving.receive_metadata(end_of_stream(1))
                if first != "metadata":
                    take(receiving)

            def send(receiving=receiving, kind=kind, body=body):
                receiving.receive_body(tag(0, kind), body)

            steps = [send, schema] if first == "body" else [schema, send]
            if passes:
                for step in steps:
                    step()
                with pytest.raises(RemoteProtocolError, match="body of message 0 twice"):
                    send()
            else:
                with pytest.raises(RemoteProtocolError, match="body of 8 bytes for message 0, which has none"):
                    [step() for step in steps]

    @pytest.mark.parametrize("header", [b"", b"\x00", b"no flatbuffer", BATCH.header[:40]])
    def test_metadata_without_a_message_is_refused(self, header):
        with pytest.raises(RemoteProtocolError):
            receiver().receive_metadata(metadata(0, header))


class TestDuplicates:
    def test_metadata_waiting(self):
        receiving = receiver(schema=True)
        receiving.receive_metadata(metadata(2, BATCH.header))
        with pytest.raises(RemoteProtocolError, match="metadata of message 2 twice"):
            receiving.receive_metadata(metadata(2, BATCH.header))

    @pytest.mark.parametrize("kind", [0, 1])
    def test_body_waiting_of_either_kind(self, kind):
        receiving = receiver(schema=True)
        receiving.receive_body(tag(1), BATCH.body)
        with pytest.raises(RemoteProtocolError, match="body of message 1 twice"):
            receiving.receive_body(tag(1, kind), BATCH.body)

    def test_metadata_and_body_delivered(self):
        receiving = receiver(schema=True)
        receive(receiving, 1, PACKED)
        take(receiving)
        with pytest.raises(RemoteProtocolError, match="metadata of message 1 twice"):
            receiving.receive_metadata(metadata(1, BATCH.header))
        with pytest.raises(RemoteProtocolError, match="body of message 1 twice"):
            receiving.receive_body(tag(1), BATCH.body)
        with pytest.raises(RemoteProtocolError, match="metadata of message 0 twice"):
            receiving.receive_metadata(metadata(0, SCHEMA.header))


class TestEnd:
    @pytest.mark.parametrize("count", [0, 1, 2, 0xFFFFFFFF])
    def test_an_end_before_what_was_sent_is_refused(self, count):
        receiving = receiver(schema=True)
        receiving.receive_metadata(metadata(2, BATCH.header))
        with pytest.raises(RemoteProtocolError, match="has sent message 2"):
            receiving.receive_metadata(end_of_stream(count))

    def test_a_body_is_something_that_was_sent(self):
        receiving = receiver(schema=True)
        receiving.receive_body(tag(1), BATCH.body)
        with pytest.raises(RemoteProtocolError, match="has sent message 1"):
            receiving.receive_metadata(end_of_stream(1))

    def test_an_end_before_what_was_delivered_is_refused(self):
        with pytest.raises(RemoteProtocolError, match="has sent message 0"):
            receiver(schema=True).receive_metadata(end_of_stream(0))

    def test_an_end_before_the_schema_is_refused(self):
        with pytest.raises(RemoteProtocolError, match="before its first message"):
            receiver().receive_metadata(end_of_stream(0))

    @pytest.mark.parametrize("sequence", [2, 3])
    def test_messages_numbered_after_the_end_are_refused(self, sequence):
        receiving = receiver(schema=True)
        receiving.receive_metadata(end_of_stream(2))
        with pytest.raises(RemoteProtocolError, match="after it ended the stream at 2"):
            receiving.receive_metadata(metadata(sequence, BATCH.header))
        with pytest.raises(RemoteProtocolError, match="after it ended the stream at 2"):
            receiving.receive_body(tag(sequence), b"")

    def test_a_stream_ends_once(self):
        receiving = receiver()
        receiving.receive_metadata(end_of_stream(2))
        with pytest.raises(RemoteProtocolError, match="an end of stream is not allowed"):
            receiving.receive_metadata(end_of_stream(2))


class TestGaps:
    """Peers that leave early, and peers that leave after the end of the stream."""

    def test_nothing_is_missing_once_complete(self):
        receiving = receiver(schema=True)
        receiving.receive_metadata(end_of_stream(1))
        receiving.disconnected()

    def test_delivered_in_full_but_without_the_end(self):
        with pytest.raises(RemoteProtocolError, match=r"message 1 is missing\Z"):
            receiver(schema=True).disconnected()

    def test_a_gap_is_named_with_what_lies_beyond(self):
        receiving = receiver(schema=True)
        receive(receiving, 2, PACKED)
        receiving.receive_body(tag(5), BATCH.body)
        receiving.receive_metadata(end_of_stream(9))
        assert receiving.next() is None
        with pytest.raises(RemoteProtocolError, match="message 1 of 9 is missing; messages up to 5 had begun"):
            receiving.disconnected()

    @pytest.mark.parametrize("half", ["metadata", "body"])
    def test_half_a_message_is_a_gap(self, half):
        receiving = receiver(schema=True)
        if half == "metadata":
            receiving.receive_metadata(metadata(1, BATCH.header))
        else:
            receiving.receive_body(tag(1), BATCH.body)
        receiving.receive_metadata(end_of_stream(2))
        with pytest.raises(RemoteProtocolError, match="message 1 of 2 is missing"):
            receiving.disconnected()


class TestCaps:
    def test_all_metadata_may_come_first_however_many_messages_that_are(self):
        receiving = receiver(schema=True)
        count = 70_000
        for sequence in range(1, count):
            receiving.receive_metadata(metadata(sequence, BATCH.header))
        receiving.receive_metadata(end_of_stream(count))
        for sequence in range(1, count):
            receiving.receive_body(tag(sequence), BATCH.body)
            assert following(receiving).sequence == sequence
        assert receiving.complete

    def test_how_many_bytes_of_metadata_may_wait_what_keeping_them_takes_included(self):
        cap = 10 * (len(BATCH.header) + 512)
        receiving = receiver(schema=True, max_waiting_metadata=cap)
        for sequence in range(2, 12):
            receiving.receive_metadata(metadata(sequence, BATCH.header))
        with pytest.raises(RemoteProtocolError, match=rf"waits for message 1; the cap is {cap} \(max_metadata\)"):
            receiving.receive_metadata(metadata(12, BATCH.header))

    def test_how_many_bytes_of_bodies_may_wait(self):
        receiving = receiver(schema=True, max_waiting_bytes=1124)
        receiving.receive_body(tag(2), bytes(60))
        receiving.receive_body(tag(3), bytes(40))
        with pytest.raises(RemoteProtocolError, match="bodies of 1636 bytes wait for message 1; the cap is 1124"):
            receiving.receive_body(tag(4), b"")

    def test_metadata_of_one_message_has_a_limit(self):
        receiving = receiver(schema=True, max_metadata=len(BATCH.header))
        receiving.receive_metadata(metadata(1, BATCH.header))
        with pytest.raises(RemoteProtocolError, match=r"at most \d+ are accepted \(max_metadata\)"):
            receiving.receive_metadata(metadata(2, BATCH.header + bytes(8)))

    def test_the_body_that_is_waited_for_always_fits_and_delivery_makes_room(self):
        receiving = receiver(schema=True, max_waiting_bytes=32 + 512)
        for sequence in range(1, 20, 2):
            receive(receiving, sequence + 1, PACKED)
            receive(receiving, sequence, PACKED)
            assert len(take(receiving)) == 2


class TestBodies:
    @pytest.mark.parametrize("tag_", [2 << 56 | 1, 0xFF << 56 | 1])
    def test_an_unknown_kind_is_refused(self, tag_):
        with pytest.raises(RemoteProtocolError, match="unknown kind"):
            receiver(schema=True).receive_body(tag_, b"")

    @pytest.mark.parametrize("bit", [32, 44, 55])
    def test_reserved_bits_are_refused(self, bit):
        with pytest.raises(RemoteProtocolError, match="reserved"):
            receiver(schema=True).receive_body(1 << bit | 1, b"")

    @pytest.mark.parametrize(
        ("form", "body"),
        [
            (PACKED, b""),
            (PACKED, PACKED.sent[:-1]),
            (PACKED, PACKED.sent + b"\0"),
            (EMPTY_PACKED, b"\0"),
            (LISTED, b""),
            (LISTED, address_list()),
            (LISTED, address_list((4096, 32))),  # a buffer too few
            (LISTED, address_list((0, 0), (4096, 32), (0, 0))),  # a buffer too many
            (LISTED, address_list((0, 0), (4096, 24))),  # a buffer too short
            (LISTED, address_list((0, 0), (4096, 40))),  # too long, as if padded
            (LISTED, address_list((4096, 32), (0, 0))),  # in the wrong order
            (LISTED, address_list((64, 16), (128, 16))),  # the right sum in other parts
            (LISTED, uint64s(31, 2, 0, 0, 4096, 32)),  # wrong total
            (LISTED, uint64s(32, 1, 0, 0, 4096, 32)),  # wrong count
        ],
    )
    def test_a_body_that_disagrees_with_its_metadata_is_refused(self, form, body):
        receiving = receiver(schema=True)
        receive(receiving, 1, form._replace(sent=body))
        with pytest.raises(RemoteProtocolError):
            receiving.next()

    @pytest.mark.parametrize(
        "extents",
        [[], [(64, 40)], [(0, 24), (24, 24), (48, 48)], [(0, 24), (24, 40), (64, 24)]],
        ids=["nothing", "values alone", "other lengths", "another order"],
    )
    def test_addresses_of_a_sparse_tensor_that_disagree_with_its_metadata(self, extents):
        receiving = receiver()
        receiving.receive_metadata(metadata(0, SPARSE.header))
        receiving.receive_body(tag(0, kind=1), address_list(*[(4096 + at, length) for at, length in extents]))
        with pytest.raises(RemoteProtocolError, match=r"its metadata announced (3|24|40)"):
            receiving.next()

    def test_the_announced_length_is_known_once_the_metadata_is(self):
        receiving = receiver(schema=True)
        assert receiving.announced_length(0x0000000000000001) is None
        receiving.receive_metadata(metadata(1, BATCH.header))
        assert receiving.announced_length(0x0000000000000001) == 32
        assert receiving.announced_length(0x0100000000000001) == 16 + 2 * 16
        receiving.receive_metadata(metadata(2, EMPTY_BATCH.header))
        assert receiving.announced_length(0x0000000000000002) == 0
        with pytest.raises(RemoteProtocolError, match="reserved"):
            receiving.announced_length(1 << 55)


def in_state(state: State) -> Receiver:
    """Return a receiver in this state. After IDLE it has received the schema, and in ENDING it lacks message 1."""
    if state is State.IDLE:
        return Receiver()
    made = receiver(schema=True)
    if state is State.FAILED:
        made.fail()
    elif state is State.ENDING:
        made.receive_metadata(end_of_stream(2))
    elif state is State.COMPLETE:
        made.receive_metadata(end_of_stream(1))
    assert made.state is state
    return made


THEIRS = {
    "metadata": lambda receiving: receiving.receive_metadata(metadata(1, BATCH.header)),
    "body": lambda receiving: receiving.receive_body(tag(1), BATCH.body),
    "end": lambda receiving: receiving.receive_metadata(end_of_stream(2)),
}
OURS = {"want": lambda receiving: receiving.want(), "fail": lambda receiving: receiving.fail()}
ALLOWED = {
    State.IDLE: {"want": State.STREAMING, "fail": State.FAILED},
    State.STREAMING: {
        "metadata": State.STREAMING,
        "body": State.STREAMING,
        "end": State.ENDING,
        "fail": State.FAILED,
    },
    State.ENDING: {"metadata": State.ENDING, "body": State.ENDING, "fail": State.FAILED},
    State.COMPLETE: {"fail": State.FAILED},
    State.FAILED: {"fail": State.FAILED},
}


def test_every_step_in_every_state_is_allowed_or_the_fault_of_whoever_took_it():
    check_steps(in_state, ALLOWED, THEIRS, OURS)


class AnyOrder(RuleBasedStateMachine):
    """A sending peer, a reordering network, and a consumer that reads at any time, all at once."""

    @initialize(start=st.sampled_from([0, ROLLS_OVER_AFTER_3]), forms=st.sampled_from([FORMS, TENSOR_FORMS]))
    def begin(self, start: int, forms: list[Form]) -> None:
        self.forms = forms
        self.receiving = receiver(start)
        self.start = self.number = start
        self.in_flight: list[tuple] = []
        self.arrived: list[tuple] = []
        self.expected: list[tuple] = []
        self.delivered: list[tuple] = []
        self.ended = False

    @precondition(lambda self: not self.ended)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        form = data.draw(st.sampled_from(self.forms))
        if self.number == 0 and self.forms is FORMS:
            self.in_flight.append((None, metadata(0, SCHEMA.header)))
            self.expected.append((0, SCHEMA.header, None))
        else:
            self.in_flight.append((None, metadata(self.number, form.message.header)))
            self.in_flight.append((tag(self.number, form.kind), form.sent))
            self.expected.append((self.number, form.message.header, form.delivered))
        self.number += 1

    @precondition(lambda self: not self.ended and self.number > self.start)
    @rule()
    def end(self) -> None:
        self.in_flight.append((None, end_of_stream(self.number)))
        self.ended = True

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        message = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        self.pass_on(message)
        self.arrived.append(message)

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def arrive_again(self, data: st.DataObject) -> None:
        with pytest.raises(RemoteProtocolError):
            self.pass_on(data.draw(st.sampled_from(self.arrived)))

    @rule(most=st.integers(1, 5))
    def take(self, most: int) -> None:
        for _ in range(most):
            delivery = self.receiving.next()
            if delivery is None:
                return
            self.delivered += seen([delivery])

    @rule()
    def disconnect(self) -> None:
        if self.receiving.complete:
            self.receiving.disconnected()
            return
        missing = self.start + len(self.delivered)
        with pytest.raises(RemoteProtocolError, match=f"message {missing} .*is missing"):
            self.receiving.disconnected()

    @invariant()
    def delivers_once_in_order(self) -> None:
        assert self.delivered == self.expected[: len(self.delivered)]

    @invariant()
    def complete_when_everything_up_to_the_end_was_delivered(self) -> None:
        end_arrived = any(tag is None and message[0] == 0 for tag, message in self.arrived)
        assert self.receiving.complete is (end_arrived and len(self.delivered) == len(self.expected))

    def teardown(self) -> None:
        """Deliver the messages in flight at the end. No message may be lost."""
        if not hasattr(self, "receiving"):
            return
        for message in self.in_flight:
            self.pass_on(message)
        self.delivered += seen(take(self.receiving))
        assert self.delivered == self.expected
        assert self.receiving.complete is self.ended

    def pass_on(self, message: tuple) -> None:
        tag, content = message
        if tag is None:
            self.receiving.receive_metadata(content)
        else:
            self.receiving.receive_body(tag, content)


TestAnyOrder = AnyOrder.TestCase

headers = st.sampled_from([SCHEMA.header, *(form.message.header for form in FORMS + TENSOR_FORMS)]) | st.binary(
    max_size=64
)
numbers = st.integers(0, 4) | st.integers(0, 2**32 - 1)
metadata_messages = st.builds(metadata, numbers, headers) | st.builds(end_of_stream, numbers) | st.binary()
tags = st.builds(tag, numbers, st.integers(0, 2)) | st.integers(0, 2**64 - 1)
bodies = st.sampled_from([form.sent for form in FORMS + TENSOR_FORMS]) | st.binary()


@given(
    st.lists(st.tuples(st.none(), metadata_messages) | st.tuples(tags, bodies)),
    st.sampled_from([0, 2**32 - 2]),
)
def test_whatever_a_peer_sends_is_delivered_in_order_or_refused_as_its_fault(messages, start):
    receiving, delivered = receiver(start), []
    for tag_, content in messages:
        with suppress(RemoteProtocolError):  # no other exception
            if tag_ is None:
                receiving.receive_metadata(content)
            else:
                receiving.receive_body(tag_, content)
            delivered += take(receiving)
    assert [delivery.sequence for delivery in delivered] == list(range(start, start + len(delivered)))


@pytest.mark.parametrize("form", FORMS)
def test_the_two_roles_understand_each_other(form):
    sending, receiving = Sender(Tags({7: Streams.BOTH}, free_data=8)), Receiver()
    receiving.want()
    assert sending.receive(Incoming(7, b"ticket")) == StreamRequested(Request(b"ticket"), Streams.BOTH, 7)
    messages = [
        *sending.send(SCHEMA.header, None),
        *sending.send(form.message.header, Body(BodyKind(form.kind), [form.sent[:7], form.sent[7:]])),
        *sending.end(),
    ]
    for tag_, parts in messages:
        if tag_ is None:
            receiving.receive_metadata(joined(parts))
        else:
            receiving.receive_body(tag_, joined(parts))
    assert seen(take(receiving)) == [(0, SCHEMA.header, None), (1, form.message.header, form.delivered)]
    assert receiving.complete
    receiving.disconnected()
