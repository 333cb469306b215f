"""The one thing that the protocol hands to a transport to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

#: Anything with the buffer protocol, C-contiguous: bytes, memoryview, pyarrow.Buffer. (PEP 688 needs Python 3.12.)
Buffer: TypeAlias = Any


class Message(NamedTuple):
    """A delimited message, tagged or not ("Requirements").

    `tag` is None for an untagged message. `parts` are sent one after the other and arrive as one; they are
    borrowed until the send returns and never joined on the way.
    """

    tag: int | None
    parts: Sequence[Buffer]
