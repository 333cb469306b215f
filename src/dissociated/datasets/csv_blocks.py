"""The bytes of CSV, in the blocks that libarrow parses, and the end of the text, which libarrow does not check."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from dissociated.codec.reader import Readable

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
        pa.ArrowInvalid: The text ends within a quoted value. An open file raises it at its end.
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
    with open(path, "rb") as file:

        def read(start: int, end: int) -> bytes:
            text = os.pread(file.fileno(), end - start, start)
            return text if start else b"\n" + text.removeprefix(_UTF_8_MARK)

        is_odd, _ = _borders(read, os.fstat(file.fileno()).st_size)
    return is_odd


def _borders(read: Callable[[int, int], bytes], end: int) -> tuple[bool, bool]:
    """Look at the last quotes of a text that begin or end values, back to a place where no quoted value is open.

    An even number of successive quotes is an empty value, or quotes within a value. An odd number ends a value, or
    begins one after a comma or a line break. Elsewhere it may also be a part of a value that does not begin with a
    quote. So after an odd number that does not come after a comma or a line break, no quoted value is open.

    Args:
        read: Returns the text from one position to another. The text begins with another byte than a quote.
        end: The end of the text.

    Returns:
        Whether the number of these quotes is odd, and whether no quoted value is open before them.
    """
    borders, first, quote = 0, end, b""  # `first`: no border was found between `end` and this position
    while end > 0:
        if first - end >= 2 * BLOCK_SIZE:  # libarrow refuses a value that is longer
            return borders % 2 == 1, True
        start = end - _TAIL_SIZE if end > _TAIL_SIZE + len(_UTF_8_MARK) else 0
        text = read(start, end) + quote
        searched = text.lstrip(b'"')  # more quotes may come before the first ones
        single = searched.replace(b'""', b"")  # leaves a quote for each odd number
        if b'"' in single:
            first = start
            decisive = single.replace(b',"', b", ").replace(b'\n"', b"\n ").replace(b'\r"', b"\r ")
            at = decisive.rfind(b'"')
            borders += single.count(b'"', at + 1)
            if at >= 0:
                return borders % 2 == 1, True
        end, quote = start, b'"' * ((len(text) - len(searched)) % 2)
    return borders % 2 == 1, False


def _incomplete() -> pa.ArrowInvalid:
    return pa.ArrowInvalid(
        "a quoted value begins and does not end, so the text is incomplete, or has one quote too many: write the text "
        "again, with each value whole, and each quote within a quoted value twice"
    )


class _CsvBlocks(Readable):
    """CSV of which no read ends within CR LF. Reading its end raises ArrowInvalid if that is within a quoted value.

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
        is_odd, is_whole = _borders(lambda start, end: searched[start:end], len(searched))
        self._is_open = (self._is_open and not is_whole) ^ is_odd
        self._end = text[len(searched) - 1 :]

    def are_open(self) -> bool:
        """Return whether the text ends here within a quoted value."""
        self.follow(b"\n")
        return self._is_open
