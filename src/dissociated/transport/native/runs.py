"""Runs over media that have messages of their own: a run is one tagged message.

Tagged messages come in the order in which they were sent, so a run comes after the bodies before it, and it is received
as bodies are, straight into Arrow's memory. A server says in its URI that it sends runs, and sends them to clients that
have answered that they take them; each medium has its own way of answering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dissociated.protocol.message import Message, Run
from dissociated.transport.runs import EncodedRun, encode_runs
from dissociated.uri import Uri

#: The tag of a run. It is none of a body, whose kinds are fewer, and none of what fabric says beside the protocol.
RUN = 0xFE44_4953_534F_0200
#: What a server that sends runs says in its URI.
OFFER = {"runs": "1"}


def offers_runs(uri: Uri) -> bool:
    """Whether the server with this URI sends runs to who takes them."""
    return all(uri.parameters.get(name) == value for name, value in OFFER.items())


def with_runs(messages: Sequence[Message | Run]) -> Iterator[Message]:
    """The messages in order, each run of alike small ones among them as one message."""
    for one in encode_runs(messages):
        yield Message(RUN, one.parts) if isinstance(one, EncodedRun) else one
