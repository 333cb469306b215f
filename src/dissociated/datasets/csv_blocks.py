"""The bytes of CSV, in the blocks that libarrow parses, and the end of the text, which libarrow does not check."""

from __future__ import annotations

import os
import re
from typing import Any

import pyarrow as pa

from dissociated.codec.reader import Readable
from dissociated.errors import SourceError

BLOCK_SIZE = 16 << 20  # bytes of text; the types of the columns are inferred from the first block
_TAIL_SIZE = 1 << 18  # bytes at the end of a file that are searched at once
_UTF_8_MARK = b"\xef\xbb\xbf"
#: A value that begins with a quote. The group is empty if it does not end.
_QUOTED = re.compile(rb'[,\r\n]"[^"]*(?:""[^"]*)*("?)')
#: An odd number of quotes, and the byte before them.
_ODD_QUOTES = re.compile(rb'([^"])"(?:"")*(?!")')


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
    if _may_end_quoted(source):
        blocks = _CsvBlocks(pa.input_stream(source))
        while blocks.read(BLOCK_SIZE):
            pass
    return file


def _splits_crlf(path: str) -> bool:
    """Return whether a block of the file ends within CR LF."""
    with open(path, "rb") as file:
        starts = range(BLOCK_SIZE, os.fstat(file.fileno()).st_size, BLOCK_SIZE)
        return any(os.pread(file.fileno(), 2, start - 1) == b"\r\n" for start in starts)


def _may_end_quoted(path: str) -> bool:
    """Return whether the file may end within a quoted value, by its last odd number of successive quotes.

    Within a value, quotes come in pairs. So if the last value does not end, these quotes are where it begins. A quote
    that ends a value can look the same if the value itself ends with a comma or a line break.
    """
    with open(path, "rb") as file:
        end, quotes = os.fstat(file.fileno()).st_size, b""
        while end > 0:
            start = max(0, end - _TAIL_SIZE)
            text = os.pread(file.fileno(), end - start, start) + quotes
            if start == 0:
                text = b"\n" + text
            if before := _ODD_QUOTES.findall(text):
                return before[-1] in b",\r\n" + _UTF_8_MARK
            end, quotes = start, text[: len(text) - len(text.lstrip(b'"'))]
    return False


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
        if size and not text and self._quotes.is_open:
            raise SourceError.for_peer(
                "the CSV ends within a quoted value, so it is incomplete: write it again, with the quote at its end"
            )
        return text


class _Quotes:
    """The quotes in a CSV text that is read piece by piece."""

    def __init__(self) -> None:
        self._text = b""  # a short text that ends within a value if and only if the text so far does

    def follow(self, text: bytes) -> None:
        """Follow the next piece of the text."""
        text = self._text + text if self._text else b"\n" + text.removeprefix(_UTF_8_MARK)
        pairless = text.rstrip(b'"')  # the last quote may be the first of a pair
        self._text = (b',"' if _is_open(pairless) else pairless[-1:]) + text[len(pairless) :]

    @property
    def is_open(self) -> bool:
        """Whether the text so far ends within a quoted value."""
        return _is_open(self._text)


def _is_open(text: bytes) -> bool:
    ends = _QUOTED.findall(text) if b'"' in text else []
    return bool(ends) and not ends[-1]
