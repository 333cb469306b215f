"""Write the test vectors that docs/vectors.md describes.

python tests/vectors/make.py FOLDER

The encoder is that of the porter's peer, which knows nothing of the library.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[1]))

from porter import double
from porter.double import ABORT, PREAMBLE, REGION, RUN, TAGGED, UNTAGGED, Message, address_list, encode, end
from support.arrow_cases import ARRAYS
from support.tensor_cases import GOLDEN

VERSION = 1
TICKET = b"vector"
#: The tags exceed 2**53, so that a reader which takes them for floating-point numbers fails.
WANT, FREE = 0x4449_5353_0000_0003, 0x4449_5353_0000_0100
FILE, SEALED, LIVE = 0, 1, 2
LIVE_SIZE = 1 << 36
BASE = 0x10_0000
SCATTER = 0x1_0000  # bytes between the regions of single buffers


@dataclass
class Shared:
    """A region, and the content of its beginning."""

    base: int
    content: bytes
    backing: int = SEALED
    size: int | None = None
    #: The kind of file to make, if it differs from the announced backing.
    made_as: int | None = None

    @property
    def frame(self) -> bytes:
        return encode(REGION, struct.pack("<QQQ", self.base, self.size or len(self.content), self.backing))


@dataclass
class Vector:
    """A conversation. `server` has frames, and regions whose descriptor travels with their frame."""

    name: str
    description: str
    server: Sequence[bytes | Shared]
    expected: bytes | None = None
    frees: Sequence[int] = ()
    client: bytes = PREAMBLE + encode(TAGGED, TICKET, WANT)
    abort: int | str | None = "no"
    broken_rule: str | None = None
    breaks: str = "server"
    preamble: bytes = PREAMBLE
    request: dict[str, object] | None = None

    def __post_init__(self) -> None:
        if self.request is not None:
            self.client = PREAMBLE + encode(TAGGED, double.structured(TICKET, **self.request), WANT)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        sent = self.preamble
        regions: list[dict[str, object]] = []
        for part in self.server:
            if isinstance(part, Shared):
                (folder / f"region-{len(regions)}").write_bytes(part.content)
                regions.append(
                    {
                        "file": f"region-{len(regions)}",
                        "at": len(sent),
                        "base": str(part.base),
                        "size": str(part.size or len(part.content)),
                        "backing": part.backing,
                    }
                    | ({} if part.made_as is None else {"made_as": part.made_as})
                )
                part = part.frame
            sent += part
        plain: dict[str, object] = {
            "description": self.description,
            "medium": "shm" if regions else "stream",
            "want_data": str(WANT),
            "ticket": TICKET.decode(),
        }
        if self.request is not None:
            plain["request"] = self.request
        if regions:
            plain |= {"free_data": str(FREE), "regions": regions, "frees": [*map(str, self.frees)]}
        if self.abort != "no":
            plain["abort"] = self.abort
        if self.broken_rule is not None:
            plain |= {"broken_rule": self.broken_rule, "breaks": self.breaks}
        (folder / "vector.json").write_text(json.dumps(plain, indent=2) + "\n")
        (folder / "client").write_bytes(self.client)
        (folder / "server").write_bytes(sent)
        if self.expected is not None:
            (folder / "stream.arrows").write_bytes(self.expected)


# Streams


def stream_of(batches: Sequence[pa.RecordBatch], **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def messages_of(stream: bytes) -> list[Message]:
    """Return the messages of an IPC stream, or of encapsulated tensors."""
    messages, at = [], 0
    while at < len(stream):
        (length,) = struct.unpack_from("<i", stream, at + 4)
        if not length:
            break
        header = stream[at + 8 : at + 8 + length]
        at += 8 + length
        if header[double.slot(header, double.follow(header, 0), 1)] == 1:  # a schema
            messages.append(Message(header, None))
            continue
        place = double.slot(header, double.follow(header, 0), 3)
        (size,) = struct.unpack_from("<q", header, place) if place else (0,)
        messages.append(Message(header, stream[at : at + size]))
        at += size
    return messages


def head(number: int, message: Message) -> bytes:
    return encode(UNTAGGED, double.metadata(number, message.header))


def body(number: int, content: bytes, kind: int = 0) -> bytes:
    return encode(TAGGED, content, kind << 56 | number & 0xFFFF_FFFF)


def packed(messages: Sequence[Message]) -> list[bytes]:
    """Return each message as its metadata followed by its packed body."""
    frames = []
    for number, message in enumerate(messages):
        frames.append(head(number, message))
        if message.body is not None:
            frames.append(body(number, message.body))
    return frames


class Memory:
    """One region that holds the bodies of messages, from `base` on."""

    def __init__(self, base: int = BASE) -> None:
        self.base, self.content, self.frees = base, bytearray(), list[int]()

    def list_of(self, message: Message) -> bytes:
        """Place a body, and return its address list."""
        assert message.body is not None
        start = self.base + len(self.content)
        self.content += message.body + bytes(-len(message.body) % 64)
        pairs = [(start + at, size) if size else (0, 0) for at, size in double.buffers(message.header)[1]]
        self.frees += [address for address, size in pairs if size]
        return address_list(pairs)


def by_address(messages: Sequence[Message], memory: Memory) -> list[bytes]:
    frames = []
    for number, message in enumerate(messages):
        frames.append(head(number, message))
        if message.body is not None:
            frames.append(body(number, memory.list_of(message), 1))
    return frames


# The vectors

SMALL = [
    pa.record_batch({"n": pa.array([at, None, at + 2], pa.int32()), "s": ["a", "", f"word {at}"]}) for at in range(3)
]
MANY = [pa.record_batch({"n": pa.array([at, None]), "f": [0.5, float(at)]}) for at in range(40)]
WORDS = [
    pa.record_batch({"d": pa.array(words).dictionary_encode(), "u": pa.array(words, pa.string_view())})
    for words in (["a", "b"], ["c", "longer than twelve bytes"], ["a"])
]


def every_type() -> pa.RecordBatch:
    columns = {
        f"{name}, {'holes' if at else 'full'}": one for name, some in ARRAYS.items() for at, one in enumerate(some)
    }
    return pa.record_batch(list(columns.values()), list(columns))


def valid() -> Iterable[Vector]:
    yield from streams()
    yield from orders()
    yield from memories()
    yield from tensors()
    yield from aborts()
    yield from requests()


def streams() -> Iterable[Vector]:
    contents: dict[str, tuple[str, bytes]] = {
        "types": ("every type, with and without nulls", stream_of([every_type(), every_type().slice(3, 5)])),
        "no-rows": ("a batch without rows, whose body is sent and is empty", stream_of([SMALL[0].slice(0, 0)])),
        "no-batches": ("a schema and no batch", no_batches()),
        "dictionaries": ("dictionaries that are replaced, and string views", stream_of(WORDS)),
        "dictionary-deltas": (
            "dictionaries that grow",
            stream_of(
                [
                    pa.record_batch({"d": pa.DictionaryArray.from_arrays([0, len(words) - 1], words)})
                    for words in (["a", "b"], ["a", "b", "c"])
                ],
                emit_dictionary_deltas=True,
            ),
        ),
        "lz4": (
            "bodies that are compressed with LZ4",
            stream_of([pa.record_batch({"n": [7] * 500})], compression="lz4"),
        ),
        "zstd": (
            "bodies that are compressed with ZSTD",
            stream_of([pa.record_batch({"n": [7] * 500})], compression="zstd"),
        ),
    }
    for name, (description, stream) in contents.items():
        messages = messages_of(stream)
        yield Vector(
            f"packed-{name}", f"Packed bodies: {description}.", [*packed(messages), end(len(messages))], stream
        )
        memory = Memory()
        frames = by_address(messages, memory)
        if memory.frees:
            shared = Shared(BASE, bytes(memory.content))
            yield Vector(
                f"address-{name}",
                f"Bodies by address in one sealed region: {description}.",
                [shared, *frames, end(len(messages))],
                stream,
                memory.frees,
            )
    stream = stream_of(MANY)
    first, *rest = messages_of(stream)
    pairs = [(double.metadata(number, one.header), number, one.body or b"") for number, one in enumerate(rest, 1)]
    yield Vector("run", "Packed bodies in one RUN.", [head(0, first), double.run_of(pairs), end(len(rest) + 1)], stream)
    memory = Memory()
    listed = [
        (double.metadata(number, one.header), 1 << 56 | number, memory.list_of(one))
        for number, one in enumerate(rest, 1)
    ]
    frames = [head(0, first), double.run_of(listed), end(len(rest) + 1)]
    yield Vector(
        "run-address", "Address lists in one RUN.", [Shared(BASE, bytes(memory.content)), *frames], stream, memory.frees
    )
    turned = [*reversed(pairs)]
    yield Vector(
        "run-reversed",
        "Two runs, with the messages of each in reverse order.",
        [head(0, first), double.run_of(turned[:20]), double.run_of(turned[20:]), end(len(rest) + 1)],
        stream,
    )


def no_batches() -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, SMALL[0].schema).close()
    return bytes(sink.getvalue())


def orders() -> Iterable[Vector]:
    stream = stream_of(SMALL)
    messages = messages_of(stream)
    heads = [head(number, one) for number, one in enumerate(messages)]
    bodies = [body(number, one.body) for number, one in enumerate(messages) if one.body is not None]
    last = end(len(messages))
    arrangements = {
        "metadata-first": ("all metadata, the end of stream, then all bodies", [*heads, last, *bodies]),
        "bodies-first": ("all bodies, then all metadata", [*bodies, *heads, last]),
        "bodies-reversed": ("bodies in reverse order", [*heads, last, *bodies[::-1]]),
        "reversed": ("everything in reverse order, the end of stream first", [last, *bodies[::-1], *heads[::-1]]),
        "schema-last": ("the schema after the batches", [*heads[1:], *bodies, last, heads[0]]),
        "end-early": (
            "the end of stream before the last batch",
            [*heads[:-1], *bodies[:-1], last, heads[-1], bodies[-1]],
        ),
        "interleaved": (
            "each body before its metadata",
            [heads[0], *(one for pair in zip(bodies, heads[1:], strict=True) for one in pair), last],
        ),
        "schema-body": (
            "an empty body for the schema, which is tolerated",
            [heads[0], body(0, b""), *heads[1:], *bodies, last],
        ),
        "unpadded": (
            "metadata that is not padded to 8 bytes",
            [encode(UNTAGGED, double.metadata(number, one.header) + bytes(3)) for number, one in enumerate(messages)]
            + [*bodies, last],
        ),
    }
    for name, (description, frames) in arrangements.items():
        yield Vector(f"order-{name}", f"Order: {description}.", frames, stream)


def memories() -> Iterable[Vector]:
    stream = stream_of(SMALL)
    messages = messages_of(stream)
    last = end(len(messages))

    memory = Memory()
    frames = by_address(messages, memory)
    content = bytes(memory.content)
    yield Vector(
        "region-file", "A region that is a file.", [Shared(BASE, content, FILE), *frames, last], stream, memory.frees
    )
    yield Vector(
        "region-after-schema",
        "A region that comes after the schema.",
        [frames[0], Shared(BASE, content), *frames[1:], last],
        stream,
        memory.frees,
    )
    yield Vector(
        "region-live",
        "A live region, which announces 64 GiB and is sparse.",
        [Shared(BASE, content, LIVE, LIVE_SIZE), *frames, last],
        stream,
        memory.frees,
    )

    memory = Memory(1 << 62)
    frames = by_address(messages, memory)
    yield Vector(
        "region-high",
        "A region at an address above 2^53.",
        [Shared(1 << 62, bytes(memory.content)), *frames, last],
        stream,
        memory.frees,
    )

    regions, frames, frees = list[bytes | Shared](), list[bytes](), list[int]()
    for number, message in enumerate(messages):
        frames.append(head(number, message))
        if message.body is None:
            continue
        pairs = []
        for at, size in double.buffers(message.header)[1]:
            if size:
                regions.append(Shared(BASE + SCATTER * len(regions), message.body[at : at + size]))
                frees.append(BASE + SCATTER * (len(regions) - 1))
            pairs.append((frees[-1], size) if size else (0, 0))
        frames.append(body(number, address_list(pairs), 1))
    yield Vector("scattered", "A region for each buffer.", [*regions, *frames, last], stream, frees)
    yield Vector(
        "scattered-reversed",
        "A region for each buffer, and the regions in reverse order.",
        [*regions[::-1], *frames, last],
        stream,
        frees,
    )

    memory = Memory()
    frames = [head(0, messages[0])]
    for number, message in enumerate(messages[1:], 1):
        content = message.body or b""
        frames += [
            head(number, message),
            body(number, content) if number % 2 else body(number, memory.list_of(message), 1),
        ]
    yield Vector(
        "mixed",
        "Packed bodies and bodies by address in one stream.",
        [Shared(BASE, bytes(memory.content)), *frames, last],
        stream,
        memory.frees,
    )

    twice = stream_of([SMALL[0], SMALL[0]])
    messages = messages_of(twice)
    memory = Memory()
    listed = memory.list_of(messages[1])
    yield Vector(
        "leased-twice",
        "Two batches at the same addresses, which are freed twice.",
        [
            Shared(BASE, bytes(memory.content)),
            head(0, messages[0]),
            head(1, messages[1]),
            body(1, listed, 1),
            head(2, messages[2]),
            body(2, listed, 1),
            end(3),
        ],
        twice,
        memory.frees * 2,
    )
    one = stream_of(SMALL[:1])
    messages = messages_of(one)
    memory = Memory()
    numbers = list(struct.unpack(f"<{len(listed) // 8}Q", memory.list_of(messages[1])))
    numbers[0] = len(messages[1].body or b"")
    yield Vector(
        "padded-total",
        "An address list whose total counts padding, which is tolerated.",
        [
            Shared(BASE, bytes(memory.content)),
            head(0, messages[0]),
            head(1, messages[1]),
            body(1, struct.pack(f"<{len(numbers)}Q", *numbers), 1),
            end(2),
        ],
        one,
        memory.frees,
    )


def tensors() -> Iterable[Vector]:
    for name in ("dense", "coo_int64", "csr_int64", "csc_int64", "csf_int64"):
        stream = GOLDEN[name]
        messages = messages_of(stream)
        yield Vector(
            f"tensor-{name.partition('_')[0]}",
            "A tensor as a packed body.",
            [*packed(messages), end(len(messages))],
            stream,
        )


def aborts() -> Iterable[Vector]:
    stream = stream_of(SMALL)
    messages = messages_of(stream)
    begun = packed(messages)[:3]
    expected = stream_of(SMALL[:1])
    yield Vector(
        "abort-source",
        "The source fails after the first batch.",
        [*begun, encode(ABORT, b"the source failed\x0014 4f3a9c12d07e")],
        expected,
        abort=14,
    )
    yield Vector(
        "abort-ticket", "The ticket is unknown.", [encode(ABORT, b"no dataset has this ticket\x0027")], abort=27
    )
    yield Vector(
        "abort-no-code",
        "A reason without a code.",
        [*begun, encode(ABORT, "das Gerät brennt".encode())],
        expected,
        abort=None,
    )
    yield Vector(
        "abort-unknown-code",
        "A code that no receiver knows yet.",
        [encode(ABORT, b"something new\x0099999")],
        abort=None,
    )


def requests() -> Iterable[Vector]:
    stream = stream_of(SMALL)
    messages = messages_of(stream)
    yield Vector(
        "request-ahead",
        "A structured request of a client that reads other streams first.",
        [*packed(messages), end(len(messages))],
        stream,
        request={"ahead": True},
    )
    yield Vector(
        "request-part",
        "A structured request for a publication that the ticket does not mean any more.",
        [encode(ABORT, b"this publication was replaced\x0027")],
        stream,
        abort=27,
        request={"part": "0f3a9c12d07e4b55"},
    )
    numbers = SMALL[0].select(["n"])
    stream = stream_of([numbers, numbers, numbers, numbers.slice(0, 0)])
    messages = messages_of(stream)
    memory = Memory()
    listed = memory.list_of(messages[1])
    yield Vector(
        "request-frees",
        "A client that frees messages: two share their addresses, one is packed, and one has no bytes.",
        [
            Shared(BASE, bytes(memory.content)),
            *[head(number, one) for number, one in enumerate(messages)],
            body(1, listed, 1),
            body(2, listed, 1),
            body(3, messages[3].body or b""),
            body(4, double.address_list([(0, 0)] * len(double.buffers(messages[4].header)[1])), 1),
            end(5),
        ],
        stream,
        [1, 2, 4],
        request={"frees": "messages"},
    )


def invalid() -> Iterable[Vector]:
    messages = messages_of(stream_of(SMALL))
    good, count = packed(messages), len(messages)
    schema, first = messages[0], messages[1]
    content = first.body or b""
    memory = Memory()
    listed = memory.list_of(first)
    numbers = struct.unpack(f"<{len(listed) // 8}Q", listed)
    region = Shared(BASE, bytes(memory.content))
    begun = [head(0, schema), head(1, first)]

    def changed(at: int, value: int) -> bytes:
        return struct.pack(f"<{len(numbers)}Q", *numbers[:at], value, *numbers[at + 1 :])

    cases: list[tuple[str, str, Sequence[bytes | Shared]]] = [
        ("frame-kind", "A frame of kind 6.", [encode(6, b"")]),
        ("frame-tag", "An UNTAGGED frame with a tag.", [encode(UNTAGGED, double.metadata(0, schema.header), 1)]),
        ("frame-length", "The head of a REGION of 70,000 bytes.", [struct.pack("<QQ", REGION << 56 | 70_000, 0)]),
        ("run-length", "A RUN of no messages.", [encode(RUN, bytes(24))]),
        ("metadata-prefix", "Metadata of kind 2.", [encode(UNTAGGED, b"\x02" + bytes(4))]),
        ("metadata-message", "Metadata that is no flatbuffer.", [encode(UNTAGGED, double.metadata(0, b"\xff" * 64))]),
        ("schema-first", "A batch as message 0.", [head(0, first)]),
        ("schema-body", "A body of 8 bytes for the schema.", [head(0, schema), body(0, bytes(8))]),
        (
            "buffer-count",
            "A batch with fewer buffers than its schema needs.",
            [head(0, schema), *other_columns(1), end(2)],
        ),
        ("tensors-alone", "A tensor after a schema.", [head(0, schema), head(1, messages_of(GOLDEN["dense"])[0])]),
        ("message-once", "Metadata that comes twice.", [*begun, head(1, first)]),
        ("end-length", "An end of stream of 6 bytes.", [*good, encode(UNTAGGED, struct.pack("<BIB", 0, count, 0))]),
        ("end-once", "Two ends of stream.", [head(0, schema), end(count), end(count)]),
        ("end-count", "An end of stream that counts no message.", [end(0)]),
        ("end-count", "A count below the number of a message.", [*good, end(count - 1)]),
        ("stream-whole", "A connection that ends without the last body.", [*good[:-1], end(count)]),
        ("tag-reserved", "A reserved bit in the tag of a body.", [*begun, encode(TAGGED, content, 1 << 40 | 1)]),
        ("tag-kind", "A body of kind 2.", [*begun, encode(TAGGED, content, 2 << 56 | 1)]),
        ("body-length", "A body that is too short.", [*begun, body(1, content[:-8])]),
        (
            "list-length",
            "An address list without its last number.",
            [region, head(0, schema), body(1, listed[:-8], 1), head(1, first)],
        ),
        (
            "list-count",
            "An address list of one pair too few.",
            [
                region,
                head(0, schema),
                body(1, address_list([*zip(numbers[2:-2:2], numbers[3:-2:2], strict=True)]), 1),
                head(1, first),
            ],
        ),
        ("list-total", "An address list with a wrong total.", [region, *begun, body(1, changed(0, numbers[0] - 1), 1)]),
        (
            "list-lengths",
            "An address list with another length than the metadata.",
            [
                region,
                *begun,
                body(
                    1,
                    address_list(
                        [
                            (address, size + 8 if size else 0)
                            for address, size in zip(numbers[2::2], numbers[3::2], strict=True)
                        ]
                    ),
                    1,
                ),
            ],
        ),
        ("address-region", "An address in no region.", [region, *begun, body(1, changed(-2, BASE - 0x1000), 1)]),
        ("region-overlap", "Two regions that overlap.", [region, Shared(BASE + 8, region.content)]),
        (
            "region-overlap",
            "Two regions that overlap, the first of which ends at 2**64.",
            [Shared(2**64 - at, region.content) for at in (len(region.content), len(region.content) + 8)],
        ),
        ("region-base", "A region that begins at 0.", [Shared(0, region.content)]),
        ("region-base", "A region that ends above 2**64.", [Shared((1 << 64) - 8, region.content)]),
        ("region-backing", "A region of backing 3.", [Shared(BASE, region.content, 3, made_as=SEALED)]),
        ("region-seals", "A file that is announced as a sealed memfd.", [Shared(BASE, region.content, made_as=FILE)]),
    ]
    seen: set[str] = set()
    for rule, description, frames in cases:
        name = f"invalid-{rule}{'-again' if rule in seen else ''}"
        seen.add(rule)
        yield Vector(name, description, frames, broken_rule=rule)
    yield Vector(
        "invalid-preamble", "Version 2 of the framing.", good, preamble=b"DISSOC\x00\x02", broken_rule="preamble"
    )
    want = encode(TAGGED, TICKET, WANT)
    clients: list[tuple[str, str, bytes]] = [
        ("client-tags", "A request with another tag.", PREAMBLE + encode(TAGGED, TICKET, 1)),
        ("client-frames", "An untagged message of a client.", PREAMBLE + encode(UNTAGGED, b"hello")),
        ("request-once", "A free before the request.", PREAMBLE + encode(TAGGED, bytes(8), FREE)),
        ("request-once", "Two requests at once.", PREAMBLE + want + want),
        ("free-length", "A free of 7 bytes.", PREAMBLE + want + encode(TAGGED, bytes(7), FREE)),
        (
            "free-leased",
            "A free of an address that is not leased.",
            PREAMBLE + want + encode(TAGGED, struct.pack("<Q", 12345 * 8), FREE),
        ),
        (
            "request-members",
            "A structured request that is no JSON.",
            PREAMBLE + encode(TAGGED, b"DISSREQ\x01" + struct.pack("<I", len(TICKET)) + TICKET + b"{", WANT),
        ),
        (
            "request-members ahead",
            "A structured request whose `ahead` is a number.",
            PREAMBLE + encode(TAGGED, double.structured(TICKET, ahead=1), WANT),
        ),
        (
            "request-members part",
            "A structured request whose `part` is no text.",
            PREAMBLE + encode(TAGGED, double.structured(TICKET, part=["0f3a9c12d07e4b55"]), WANT),
        ),
        (
            "request-members frees",
            "A structured request whose `frees` is unknown.",
            PREAMBLE + encode(TAGGED, double.structured(TICKET, frees="addresses"), WANT),
        ),
        (
            "free-leased message",
            "A free of a message that the stream does not have.",
            PREAMBLE
            + encode(TAGGED, double.structured(TICKET, frees="messages"), WANT)
            + encode(TAGGED, struct.pack("<Q", 99), FREE),
        ),
        (
            "frame-length",
            "The head of a request of 70,000 bytes.",
            PREAMBLE + struct.pack("<QQ", TAGGED << 56 | 70_000, WANT),
        ),
        ("region-medium", "A region of a client.", PREAMBLE + encode(REGION, struct.pack("<QQQ", 8, 8, 0))),
    ]
    seen.clear()
    for case, description, said in clients:
        rule, _, detail = case.partition(" ")
        name = f"invalid-client-{rule}{f'-{detail}' if detail else '-again' if rule in seen else ''}"
        seen.add(rule)
        yield Vector(name, description, (), stream_of(SMALL), client=said, broken_rule=rule, breaks="client")


def other_columns(number: int) -> list[bytes]:
    message = messages_of(stream_of([SMALL[0].select(["n"])]))[1]
    return [head(number, message), body(number, message.body or b"")]


def numbers() -> Iterable[dict[str, object]]:
    """Yield messages around each wrap of the sequence numbers, the number of each on the wire, and the position."""
    for wraps in (0, 1, 2, 1 << 21):
        for next_message in ((wraps << 32) + offset for offset in (-3, -1, 0, 1, 1000)):
            for distance in (-2, -1, 0, 1, 2, 1000):
                message = next_message + distance
                if next_message >= 0 and message >= 0:
                    meant = None if distance < 0 else str(message)
                    yield {"next": str(next_message), "number": message % (1 << 32), "message": meant}


def write_all(folder: Path, make: Callable[[], Iterable[Vector]] = lambda: [*valid(), *invalid()]) -> None:
    names = []
    for vector in make():
        vector.write(folder / vector.name)
        names.append(vector.name)
    assert len(set(names)) == len(names)
    (folder / "index.json").write_text(json.dumps({"version": VERSION, "vectors": names}, indent=2) + "\n")
    (folder / "numbers.json").write_text("[\n" + ",\n".join(map(json.dumps, numbers())) + "\n]\n")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
