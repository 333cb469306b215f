"""Runs over media that have messages of their own: a run is one tagged message.

Tagged messages arrive in the order in which they were sent, so a run arrives after the bodies before it. It is received
like a body, directly into Arrow's memory. A server offers runs in its URI, and sends them to clients that have
accepted the offer; each medium has its own way of accepting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dissociated.protocol.message import Message, Run
from dissociated.transport.runs import EncodedRun, encode_runs
from dissociated.uri import Uri

#: The tag of a run. It differs from the tags of all bodies, and from those of fabric's control messages.
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
