"""The text by which a side says why it gives up: a sentence for people, and the number of an error's code.

    SENTENCE
    SENTENCE NUL NUMBER
    SENTENCE NUL NUMBER SPACE REFERENCE

The number is decimal (docs/framing.md lists them). Media carry the text as UTF-8. A peer that knows no codes takes all
of it for the sentence, and a text without a code is of a peer that gives none.
"""

from __future__ import annotations

from dissociated.errors import (
    NUMBERED_ERRORS,
    DissociatedError,
    RemoteError,
    error_number,
    peer_message,
    reported_error,
)

_SEPARATOR = "\0"


def close_reason(error: DissociatedError) -> str:
    """Return the reason that tells a peer of `error`."""
    return f"{reason_text(peer_message(error))}{_SEPARATOR}{error_number(error)} {error.reference or ''}".rstrip(" ")


def reason_text(reason: str) -> str:
    """Return the sentence of `reason`."""
    return reason.partition(_SEPARATOR)[0]


def encode_reason(reason: str, limit: int) -> bytes:
    """Return `reason` as UTF-8 of at most `limit` bytes. The sentence is cut, and never the code."""
    text, separator, code = (part.encode(errors="backslashreplace") for part in reason.partition(_SEPARATOR))
    return (text[: max(0, limit - len(separator + code))] + separator + code)[:limit]


def decode_reason(content: bytes) -> str:
    """Return the reason in `content`, which a peer sent."""
    return content.decode(errors="replace")


def reason_error(reason: str, peer: str) -> RemoteError:
    """Return the error to raise for the `reason` of a `peer`: a RemoteError, which is of the class of its code, too."""
    text, _, code = reason.partition(_SEPARATOR)
    digits, _, reference = code.partition(" ")
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 6 else None
    kind = None if number is None else NUMBERED_ERRORS.get(number)
    message = text or f"{peer} gave up and did not say why"
    error = reported_error(RemoteError, message, None if kind is None else kind.code, reference or None)
    assert isinstance(error, RemoteError)
    error.number = number
    return error
