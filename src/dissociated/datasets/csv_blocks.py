"""The bytes of CSV, in the blocks that libarrow parses, and the end of the text, which libarrow does not check."""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from dissociated.codec.reader import Readable
from dissociated.errors import SourceError

BLOCK_SIZE = 16 << 20  # bytes of text; the types of the columns are inferred from the first block
_TAIL_SIZE = 1 << 18  # bytes at the end of a file that are searched at once
_UTF_8_MARK = b"\xef\xbb\xbf"


def csv_blocks(source: Any) -> Any:
    """Return a file that libarrow reads without splitting CR LF.

    It is a file of libarrow if possible, since a thread of libarrow that calls Python while the interpreter exits ends
    the process.

    Args:
        source: The path of a file, or an open file.

    Raises:
        SourceError: The text ends within a quoted value. An open file raises it at its end.
    """
    if not isinstance(source, str):
        return _CsvBlocks(source)
    file = pa.input_stream(source)
    if isinstance(file, pa.CompressedInputStream) or _splits_crlf(source):
        return _CsvBlocks(file)
    if _ends_quoted(source):
        raise _incomplete()
    return file


def _splits_crlf(path: str) -> bool:
    """Return whether a block of the file ends within CR LF."""
    with open(path, "rb") as file:
        starts = range(BLOCK_SIZE, os.fstat(file.fileno()).st_size, BLOCK_SIZE)
        return any(os.pread(file.fileno(), 2, start - 1) == b"\r\n" for start in starts)


def _ends_quoted(path: str) -> bool:
    """Return whether the file ends within a quoted value. Nearly always, its last few bytes show it."""
    borders = 0
    with open(path, "rb") as file:
        end, quotes = os.fstat(file.fileno()).st_size, b""
        while end > 0:
            start = end - _TAIL_SIZE if end > _TAIL_SIZE + len(_UTF_8_MARK) else 0
            text = os.pread(file.fileno(), end - start, start) + quotes
            if start == 0:
                text = b"\n" + text.removeprefix(_UTF_8_MARK)
            searched = text.lstrip(b'"')  # more quotes may come before the first ones
            more, is_whole = _borders(searched)
            borders += more
            if is_whole:
                break
            end, quotes = start, text[: len(text) - len(searched)]
    return borders % 2 == 1


def _borders(text: bytes) -> tuple[int, bool]:
    """Count the quotes at the end of `text` that begin or end values, one after the other.

    An even number of successive quotes is an empty value, or quotes within a value. An odd number ends a value, or
    begins one after a comma or a line break. Elsewhere it may also be a part of a value that does not begin with a
    quote. So after an odd number that does not come after a comma or a line break, no quoted value is open.

    Args:
        text: A part of the CSV that begins with another byte than a quote.

    Returns:
        The number of these quotes, and whether no quoted value is open before them.
    """
    text = text.replace(b'""', b"")
    borders, at = 0, len(text)
    while (at := text.rfind(b'"', 0, at)) > 0:
        if text[at - 1] not in b",\r\n":
            return borders, True
        borders += 1
    return borders, False


def _incomplete() -> SourceError:
    return SourceError.for_peer(
        "the CSV ends within a quoted value, so it is incomplete: write it again, with the quote at its end"
    )


class _CsvBlocks(Readable):
    """CSV of which no read ends within CR LF. Reading its end raises SourceError if that is within a quoted value.

    libarrow parses each read as a block. If a block ends with CR, it drops an LF at the beginning of the next block,
    even within a quoted value. It takes the end of the text for the end of a value.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._following = b""  # bytes that were read already and belong to the next block
        self._quotes = _Quotes()

    def read(self, size: int) -> bytes:
        text: bytes = self._following + self._source.read(size - len(self._following))
        self._following = self._source.read(1) if text.endswith(b"\r") else b""
        if self._following == b"\n" and len(text) > 1:
            text, self._following = text[:-1], b"\r\n"
        self._quotes.follow(text)
        if size and not text and self._quotes.are_open():
            raise _incomplete()
        return text


class _Quotes:
    """The quotes in a CSV text that is read piece by piece."""

    def __init__(self) -> None:
        self._is_open = False  # whether a quoted value is open before the last quotes
        self._end = b""  # the last byte that is no quote, and the quotes after it

    def follow(self, text: bytes) -> None:
        """Follow the next piece of the text."""
        text = self._end + text if self._end else b"\n" + text.removeprefix(_UTF_8_MARK)
        searched = text.rstrip(b'"')  # more quotes may follow the last ones
        borders, is_whole = _borders(searched)
        self._is_open = (self._is_open and not is_whole) ^ (borders % 2 == 1)
        self._end = text[len(searched) - 1 :]

    def are_open(self) -> bool:
        """Return whether the text ends here within a quoted value."""
        self.follow(b"\n")
        return self._is_open
