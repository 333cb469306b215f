"""Runs among messages that are to be sent: many small alike ones in a row, which a byte stream carries as one.

They come in pairs, an untagged message and a tagged one: the metadata and the body of a small batch. Pairs are alike
where their untagged messages have one size, and their tagged ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dissociated.protocol.message import Message

#: From how many pairs on they are a run. To receive one costs as much as 20 batches do.
MIN_RUN = 8
#: How many bytes one message of a run has at most, and all of them together: whoever keeps one batch of a run keeps
#: all of it.
_MAX_RUN_MESSAGE = 1 << 16
_MAX_SENT_RUN = 1 << 22


def split_runs(messages: Sequence[Message]) -> Iterator[tuple[bool, Sequence[Message]]]:
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
    most = _MAX_SENT_RUN // max(sum(sizes), 1) if max(sizes) <= _MAX_RUN_MESSAGE else 0
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
