"""The note in a record batch of a live stream that its consumer missed batches before it.

It is a value of the custom metadata of the message: the number of batches that were missed since the stream began, in
decimal. Servers add it to the first batch after a gap, and our clients remove it. Only streams whose URI has
`missed=1` have such notes: in other streams, metadata of this name is the user's own.
"""

from __future__ import annotations

from dissociated.errors import FormatError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.message import V5
from dissociated.format.projection import with_custom_metadata

KEY = b"dissociated.missed"
#: The most bytes that a note adds to the metadata of a batch.
MAX_NOTE_SIZE = 256
_MAX_DIGITS = 20


def note_missed(header: bytes, count: int) -> bytes:
    """Return the flatbuffer of a record batch with the note of `count` missed batches.

    A batch of metadata version V4 gets none: libarrow cannot read its custom metadata.
    """
    if Table.read(header, root(header), 1).scalar(0, "h") < V5:
        return header
    return with_custom_metadata(header, KEY, b"%d" % count)[0]


def take_missed(header: bytes) -> tuple[bytes, int | None]:
    """Return a flatbuffer without its note, and the number in the note; None if there is no note."""
    if KEY not in header:
        return header, None
    try:
        stripped, value = with_custom_metadata(header, KEY, None)
    except FormatError:  # another message that has these bytes, or a damaged one, which libarrow reports
        return header, None
    if value is None or not value.isdigit() or len(value) > _MAX_DIGITS:
        return header, None
    return stripped, int(value)
