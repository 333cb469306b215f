"""Runs among messages that are to be sent: many small alike ones in a row, which travel as one payload.

They come in pairs, an untagged message and a tagged one: the metadata and the body of a small batch. Pairs are alike
where their untagged messages have one size, and their tagged ones. The payload is described byte by byte in
docs/framing.md; each medium says in its own way that it is one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, cast

from dissociated.base.buffers import Buffer
from dissociated.errors import RemoteProtocolError
from dissociated.protocol.message import Message, Run

#: From how many pairs on they are a run. To receive one costs as much as 20 batches do.
MIN_RUN = 8
#: How many bytes one message of a run has at most, and the payload of all of them: whoever keeps one batch of a run
#: keeps all of it.
_MAX_RUN_MESSAGE = 1 << 16
_MAX_SENT_RUN = 1 << 22
#: How many bytes of payload a receiver takes.
MAX_RUN = 1 << 26

#: Messages up to this many bytes are copied together; parts of larger ones stay where they lie.
_COALESCE = 512
_PADDING = [bytes(-n % 8) for n in range(8)]
_head = struct.Struct("<QQQ")
_TAG = 8  # bytes
_MAX_OVERHEAD = _head.size + 2 * 7  # bytes of a payload beside its messages and tags


class EncodedRun(NamedTuple):
    """The payload of a run, in parts to be sent one after the other. Large parts are borrowed."""

    parts: Sequence[Buffer]


def encode_runs(messages: Sequence[Message | Run]) -> Iterator[Message | EncodedRun]:
    """The messages in order, each run of small alike ones among them as one payload."""
    for one in find_runs(messages):
        if isinstance(one, Run):
            yield _encode_run(one)
        elif isinstance(one, Alike):
            yield _encode_alike(one.messages)
        else:
            yield one


class Alike(NamedTuple):
    """Messages that are a run: untagged, tagged, untagged, tagged ..."""

    messages: Sequence[Message]


def find_runs(messages: Sequence[Message | Run]) -> Iterator[Message | Run | Alike]:
    """The same in order, with small alike messages in a row found: those that may travel as one payload."""
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
        parts += [b"".join(pieces)] if size <= _COALESCE else pieces
        parts.append(_PADDING[count * size % 8])
    return EncodedRun(parts)


def parse_run(payload: Buffer) -> Run:
    """Take the payload of a run apart. Raises RemoteProtocolError where its sizes disagree with its length."""
    memory = memoryview(payload)
    if len(memory) < _head.size:
        raise RemoteProtocolError("the peer sent a run of messages that is cut off")
    count, untagged_size, tagged_size = _head.unpack_from(memory)
    tags_at = _head.size
    untagged_at = tags_at + 8 * count
    tagged_at = untagged_at + (count * untagged_size + 7 & ~7)
    end = tagged_at + (count * tagged_size + 7 & ~7)
    if not count or end != len(memory):
        raise RemoteProtocolError(
            f"the peer sent a run of {count} messages of {untagged_size} and {tagged_size} bytes in {len(memory)} bytes"
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
    """The messages in order, in groups: whether a group is a run, and its messages."""
    at = done = 0
    while at < len(messages):
        end = _run_end(messages, at)
        if (end - at) // 2 >= MIN_RUN:
            if done < at:
                yield False, messages[done:at]
            yield True, messages[at:end]
            done = end
        at = end
    if done < len(messages):
        yield False, messages[done:]


def _run_end(messages: Sequence[Message], at: int) -> int:
    """The end of the run that begins at `at`; at least the next message, which then is none."""
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
    """How many bytes a message has."""
    size = 0
    for part in message.parts:
        size += len(part)
    return size
