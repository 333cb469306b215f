"""Runs among messages to be sent: consecutive small messages of similar shape, which travel as one payload.

A run consists of pairs of an untagged message and a tagged one: the metadata and the body of a small batch. All
untagged messages of a run have one size, and all tagged ones have one size. docs/framing.md describes the payload byte
by byte. Each medium has its own mark for a payload that is a run.

Over media that have messages of their own (ucx, fabric), a run is one tagged message. Tagged messages arrive in the
order in which they were sent, so a run arrives after the bodies before it. It is received like a body, directly into
Arrow's memory. A server offers runs in its URI, and sends them to clients that have accepted the offer; each medium has
its own way of accepting.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, cast

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.protocol.message import Message, Run
from dissociated.transport.base import MAX_JOINED
from dissociated.uri import Uri

#: Least number of pairs in a run. Receiving a run costs as much as receiving 20 batches.
MIN_RUN = 8
#: Most bytes of a message in a run, and of a run's payload. A reader that keeps one batch of a run keeps the whole run.
_MAX_RUN_MESSAGE = 1 << 16
_MAX_SENT_RUN = 1 << 22
#: Most bytes of payload that a receiver accepts.
MAX_RUN = 1 << 26

_PADDING = [bytes(-n % 8) for n in range(8)]
_head = struct.Struct("<QQQ")
_TAG = 8  # bytes
_MAX_OVERHEAD = _head.size + 2 * 7  # bytes of a payload without its messages and tags


class EncodedRun(NamedTuple):
    """The payload of a run, in parts to be sent one after the other. Large parts are borrowed."""

    parts: Sequence[Buffer]


def encode_runs(messages: Sequence[Message | Run]) -> Iterator[Message | EncodedRun]:
    """Yield the messages in order, with each run among them encoded as one payload."""
    for item in find_runs(messages):
        if isinstance(item, Run):
            yield _encode_run(item)
        elif isinstance(item, Alike):
            yield _encode_alike(item.messages)
        else:
            yield item


class Alike(NamedTuple):
    """Messages that form a run: untagged, tagged, untagged, tagged ..."""

    messages: Sequence[Message]


def find_runs(messages: Sequence[Message | Run]) -> Iterator[Message | Run | Alike]:
    """Yield the messages in order, with consecutive messages that may travel as a run grouped together."""
    if len(messages) < 2 * MIN_RUN:
        yield from messages
        return
    for is_run, some in groupby(messages, lambda message: isinstance(message, Run)):
        if is_run:
            yield from some
            continue
        for alike, group in _split_runs(cast("list[Message]", [*some])):
            if alike:
                yield Alike(group)
            else:
                yield from group


def _encode_run(run: Run) -> EncodedRun:
    head = _head.pack(run.length, run.untagged_size, run.tagged_size)
    untagged, tagged = _PADDING[len(run.untagged) % 8], _PADDING[len(run.tagged) % 8]
    return EncodedRun((head, run.tags, run.untagged, untagged, run.tagged, tagged))


def _encode_alike(messages: Sequence[Message]) -> EncodedRun:
    count, sizes = len(messages) // 2, (message_size(messages[0]), message_size(messages[1]))
    parts: list[Buffer] = [_head.pack(count, *sizes)]
    parts.append(struct.pack(f"<{count}Q", *[message.tag for message in messages[1::2]]))
    for some, size in zip((messages[0::2], messages[1::2]), sizes, strict=True):
        pieces: list[Buffer] = [part for message in some for part in message.parts]
        parts += [b"".join(pieces)] if size <= MAX_JOINED else pieces
        parts.append(_PADDING[count * size % 8])
    return EncodedRun(parts)


def parse_run(payload: Buffer) -> Run:
    """Parse the payload of a run.

    Raises:
        RemoteProtocolError: The sizes in the payload do not fit its length.
    """
    memory = memoryview(payload)
    if len(memory) < _head.size:
        raise RemoteProtocolError("the peer sent a run of messages that is cut off", rule="run-length")
    count, untagged_size, tagged_size = _head.unpack_from(memory)
    tags_at = _head.size
    untagged_at = tags_at + 8 * count
    tagged_at = untagged_at + (count * untagged_size + 7 & ~7)
    end = tagged_at + (count * tagged_size + 7 & ~7)
    if not count or end != len(memory):
        raise RemoteProtocolError(
            f"the peer sent a run of {count} messages of {untagged_size} and {tagged_size} bytes "
            f"in {len(memory)} bytes",
            rule="run-length",
        )
    return Run(
        count,
        memory[untagged_at : untagged_at + count * untagged_size],
        untagged_size,
        memory[tags_at:untagged_at],
        memory[tagged_at : tagged_at + count * tagged_size],
        tagged_size,
    )


def _split_runs(messages: Sequence[Message]) -> Iterator[tuple[bool, Sequence[Message]]]:
    """Yield groups of the messages, in order: whether a group is a run, and its messages."""
    at = group_start = 0
    while at < len(messages):
        end = _run_end(messages, at)
        if (end - at) // 2 >= MIN_RUN:
            if group_start < at:
                yield False, messages[group_start:at]
            yield True, messages[at:end]
            group_start = end
        at = end
    if group_start < len(messages):
        yield False, messages[group_start:]


def _run_end(messages: Sequence[Message], at: int) -> int:
    """Return the end of the run that begins at `at`. It is at least `at + 1`, which is not a run."""
    if at + 1 >= len(messages):
        return at + 1
    sizes = untagged, tagged = message_size(messages[at]), message_size(messages[at + 1])
    most = (_MAX_SENT_RUN - _MAX_OVERHEAD) // (sum(sizes) + _TAG) if max(sizes) <= _MAX_RUN_MESSAGE else 0
    end, stop = at, min(len(messages) - 1, at + 2 * most)
    while end < stop:
        first, second = messages[end], messages[end + 1]
        if first.tag is not None or second.tag is None:
            break
        if message_size(first) != untagged or message_size(second) != tagged:
            break
        end += 2
    return max(end, at + 1)


def message_size(message: Message) -> int:
    """Return the size of a message, in bytes."""
    size = 0
    for part in message.parts:
        size += len(part)
    return size


#: The tag of a run, over media that have messages of their own. It differs from the tags of all bodies, and from those
#: of fabric's control messages.
RUN = 0xFE44_4953_534F_0200
#: The URI parameters with which a server offers runs.
OFFER = {"runs": "1"}


def offers_runs(uri: Uri) -> bool:
    """Return whether the server with this URI offers runs."""
    return all(uri.parameters.get(name) == value for name, value in OFFER.items())


def with_runs(messages: Sequence[Message | Run]) -> Iterator[Message]:
    """Yield `messages` in order, with each run of small similar messages encoded as one message."""
    for item in encode_runs(messages):
        yield Message(RUN, item.parts) if isinstance(item, EncodedRun) else item
