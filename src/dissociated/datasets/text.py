"""CSV and JSON lines: text whose types are inferred, and which is read anew for each client."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dissociated.codec.options import WriteOptions
from dissociated.datasets.base import Dataset
from dissociated.datasets.csv_blocks import BLOCK_SIZE, csv_blocks
from dissociated.datasets.file import file_state, unchanged_reader
from dissociated.datasets.source_errors import concealed, source_errors
from dissociated.datasets.streamed import SourceDataset
from dissociated.errors import SourceError

#: The format of a text by the ending of its file, since the content does not show it.
TEXT_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_HEADER_SIZE = 1 << 16  # bytes of CSV in which the header is looked for
_EXACT = 1 << 53  # doubles hold every integer below
_LONG_NUMBER = re.compile(rb"(?<![0-9.])[0-9]{16,}(?:\.[0-9]*)?(?![0-9.eE])")
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)  # UTF-32-LE begins as UTF-16-LE does
#: The beginning of a text whose first value is null.
_NULL_FIRST = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*null")
#: The kinds of values of JSON, as they are named in errors.
_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    Decimal: "a number",
}
_MAX_LEVELS = 2_000  # libarrow parses recursively, and needs more than the usual stack of 8 MiB for 10,000
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b'{}[]"')
_STEPS = bytes(1 if byte in b"{[" else 255 for byte in range(256))  # 255 is -1
_ELEMENT = "[]"  # stands for the elements of an array in the path of a value
_ALL_DIGITS_AS_0 = bytes(48 if 48 <= byte <= 57 else byte for byte in range(256))


def text_file(name: str, path: Path, options: WriteOptions | None = None, format: str | None = None) -> Dataset:
    """Make a dataset of a file of CSV or JSON lines; the ending of the file decides if no `format` is given.

    Raises:
        SourceError: The file cannot be read, also later, if it was modified after this call.
    """
    format = format or TEXT_FORMATS[path.suffix]
    with source_errors(name):
        state = file_state(path.stat())
        if not path.stat().st_size:
            raise SourceError(f"cannot publish {str(path)!r}: the file is empty")

        def open_reader() -> pa.RecordBatchReader:
            return unchanged_reader(
                path, lambda: file_state(path.stat()) == state, lambda: open_text(name, str(path), format)
            )

        return SourceDataset(name, open_reader, options)


def open_text(name: str, source: Any, format: str) -> pa.RecordBatchReader:
    """Open a reader over CSV or JSON lines.

    Args:
        name: The name of the dataset, for errors.
        source: The path of a file, or an open CSV file. JSON lines are opened twice.
        format: `csv` or `jsonl`.

    Raises:
        SourceError: The text cannot be read, also while it is read, or a number would lose digits before its point.
    """
    source = source if isinstance(source, str) else _WatchedText(source)
    with source_errors(name), _text_errors(name, source, format):
        if format == "jsonl" and (crash := _find_crash(source)) is not None:
            row, kind, remedy = crash
            raise concealed(
                name,
                f"row {row} of {source!r} is {kind}, which would end this process: {remedy}",
                f"a row is {kind}",
            )
        reader = _open_csv(source) if format == "csv" else _open_json(source)
        return pa.RecordBatchReader.from_batches(reader.schema, _checked(name, source, format, reader))


def _open_csv(source: Any, use_threads: bool | None = None, column_types: Any = None) -> pa.RecordBatchReader:
    """Open CSV. An empty field without quotes is null. In columns that are not texts, `""` is null, too.

    libarrow takes `""` for null in all columns or in none. So it reads it as a text, which is converted here.

    Errors name the row if one thread reads, so threads only read files, which can be read again.
    """
    import pyarrow.csv

    use_threads = isinstance(source, str) if use_threads is None else use_threads
    blank_lines, columns = _header(source)
    options = pyarrow.csv.ReadOptions(block_size=BLOCK_SIZE, use_threads=use_threads)
    # Without `newlines_in_values`, libarrow ends a block at any line break, and a quoted value that has one there
    # becomes two rows.
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    if columns == 1:  # then a blank line is a row whose value is null, as which libarrow writes it
        options.skip_rows = blank_lines
        parsing.ignore_empty_lines = False

    def open_with(types: Mapping[str, pa.DataType] | None) -> pa.RecordBatchReader:
        # By default, words such as NA are null as well, a column of such words loses them, and no string is null.
        converting = pyarrow.csv.ConvertOptions(
            null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False, column_types=types
        )
        return pyarrow.csv.open_csv(csv_blocks(source), options, parsing, converting)

    reader = open_with(column_types)
    first = next(iter(reader), None)  # the block from which libarrow has inferred the types
    if first is None:
        return reader
    schema = reader.schema
    for index, (field, column) in enumerate(zip(schema, first.columns, strict=True)):
        is_inferred = not column_types or field.name not in column_types
        if is_inferred and pa.types.is_string(field.type) and pc.any(pc.equal(column, "")).as_py():
            type_ = _converted(column).type
            if not pa.types.is_null(type_):
                schema = schema.set(index, field.with_type(type_))
    batches = _with_types(schema, chain([first], reader))
    if isinstance(source, str):
        texts = {field.name: pa.string() for field in schema if field.type not in (pa.string(), pa.binary())}
        texts |= column_types or {}
        batches = _repeated(batches, lambda: _with_types(schema, open_with(texts)))
    return pa.RecordBatchReader.from_batches(schema, batches)


def _repeated(
    batches: Iterator[pa.RecordBatch], read_again: Callable[[], Iterator[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Yield batches. If libarrow cannot convert a value, yield the remaining rows of a second reading.

    If that fails as well, raise the error of the first, which has the row.
    """
    rows, batch = 0, None
    try:
        for batch in batches:
            yield batch
            rows += batch.num_rows
        return
    except pa.ArrowInvalid as error:
        first_error = error.with_traceback(None)  # which refers to the first reader
    del batches, batch
    try:
        for batch in read_again():
            if rows < batch.num_rows:
                yield batch.slice(rows)
            rows = max(0, rows - batch.num_rows)
    except pa.ArrowInvalid:
        raise first_error from None


def _with_types(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Convert columns of text to the types of `schema`."""
    for batch in batches:
        columns = list(batch.columns)
        for index, field in enumerate(schema):
            if columns[index].type != field.type:
                try:
                    columns[index] = _converted(columns[index], field.type)
                except pa.ArrowInvalid as error:
                    why = str(error).removeprefix("In CSV column #0: ")
                    raise pa.ArrowInvalid(f"column {field.name!r}: {why}") from None
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _converted(texts: pa.Array, type_: pa.DataType | None = None) -> pa.Array:
    """Convert the texts of a column of CSV to a type, or to the type that libarrow infers. An empty text becomes null.

    The texts are written as CSV and read again, since libarrow casts texts by other rules, and not to each type.
    """
    import pyarrow.csv

    written = pa.BufferOutputStream()
    table = pa.table({"text": texts, "": pa.nulls(len(texts))})  # the second column keeps null from being a blank line
    pyarrow.csv.write_csv(table, written)
    reading = pyarrow.csv.ReadOptions(block_size=written.tell())
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    converting = pyarrow.csv.ConvertOptions(null_values=[""], column_types={"text": type_} if type_ else None)
    read = pyarrow.csv.read_csv(pa.BufferReader(written.getvalue()), reading, parsing, converting)
    return read["text"].combine_chunks()


def _header(source: Any) -> tuple[int, int]:
    """Return the number of blank lines before the header of CSV, and the number of columns; 0 if there is no header.

    Raises ArrowInvalid for UTF-16 and UTF-32, of which libarrow would make a column of bytes.
    """
    beginning = _beginning(source, _HEADER_SIZE)
    if beginning.startswith(_MARKS):
        raise pa.ArrowInvalid("the text is in UTF-16 or UTF-32: write it in UTF-8")
    lines = io.StringIO(beginning.decode("utf-8-sig", "replace"), newline="")
    for blank_lines, fields in enumerate(csv.reader(lines)):
        if fields:
            return blank_lines, len(fields)
    return 0, 0


def _beginning(source: Any, size: int) -> bytes:
    """Return the first `size` bytes of CSV, or all of it if it has fewer."""
    if isinstance(source, _WatchedText):
        return source.peek(size)
    with pa.input_stream(source) as file:
        return bytes(file.read(size))


def _open_json(source: Any) -> pa.RecordBatchReader:
    import pyarrow.json

    options = pyarrow.json.ReadOptions(block_size=BLOCK_SIZE)
    schema = _without_times(pa.struct(pyarrow.json.open_json(source, options).schema))
    parsing = pyarrow.json.ParseOptions(explicit_schema=pa.schema(schema.fields))
    return pyarrow.json.open_json(source, options, parsing)


def _find_crash(path: str) -> tuple[int, str, str] | None:
    """Find the first row at which libarrow 26 crashes: it is the first value of a block and null, or nested deeply.

    Returns:
        The number of the row, its fault, and the remedy; None if there is no such row.
    """
    length, last_line = 0, b""  # the end of a block after its last line is parsed with the next block
    with pa.input_stream(path) as file:  # which decompresses the same files as libarrow's parser
        while block := file.read(BLOCK_SIZE):
            text = last_line + block
            if null := _NULL_FIRST.match(text):
                at = null.end()
                kind = f"null where libarrow begins to parse a block of {BLOCK_SIZE >> 20} MiB"
                remedy = "leave the row out, or write {} for it"
                break
            if (deep := _find_deep_line(text)) is not None:
                at, kind, remedy = deep, f"nested more than {_MAX_LEVELS:,} levels deep", "write it with fewer levels"
                break
            length += len(block)
            end = text.rfind(b"\n") + 1
            last_line = text[max(end, text.rfind(b"\r", end) + 1) :]
            if len(last_line) > 2 * BLOCK_SIZE:
                return None  # libarrow refuses a line that is longer than a block
        else:
            return None
    end = length - len(last_line) + at
    with pa.input_stream(path) as file:
        lines: int = sum(file.read(min(BLOCK_SIZE, end - at)).count(b"\n") for at in range(0, end, BLOCK_SIZE))
    return lines + 1, kind, remedy


def _find_deep_line(text: bytes) -> int | None:
    """Return the place of the first line that is nested more than _MAX_LEVELS deep, or None."""
    begin = 0
    while begin < len(text) - _MAX_LEVELS:  # skip shorter lines, many at a time
        end = text.rfind(b"\n", begin, begin + _MAX_LEVELS)
        if end < 0:
            end = text.find(b"\n", begin + _MAX_LEVELS)
            line = text[begin : end if end >= 0 else len(text)]
            if line.count(b"{") + line.count(b"[") > _MAX_LEVELS and _levels(line) > _MAX_LEVELS:
                return begin
            if end < 0:
                return None
        begin = end + 1
    return None


def _levels(line: bytes) -> int:
    """Return how deeply the values in a line of JSON are nested."""
    unescaped = line.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(unescaped.translate(None, _NO_BRACKET).split(b'"')[::2])
    levels = np.cumsum(np.frombuffer(outside_strings.translate(_STEPS), np.int8), dtype=np.int64)
    return int(levels.max(initial=0))


def _checked(name: str, source: Any, format: str, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Pass the batches on. Raise SourceError for text that is not valid, or for a number that lost digits."""
    with _text_errors(name, source, format):
        is_examined = False
        for batch in reader:
            if format == "jsonl":
                batch.validate(full=True)  # libarrow accepts JSON that is not UTF-8
            if not is_examined and any(map(_is_inexact, batch.columns)):
                for row, column, written in _long_numbers(source, format, batch.schema):
                    if not _is_kept(written):
                        raise concealed(
                            name,
                            f"row {row} of {source!r} has the number {written} in column {column!r}, which a double "
                            "cannot hold and libarrow would round: read the file with a type of your choice for that "
                            "column, such as decimal128(38, 0) or string, and publish the table",
                            "a number is too large",
                        )
                is_examined = isinstance(source, str)  # of an open file, only as much as was read
            yield batch


def _is_inexact(column: pa.Array) -> bool:
    """Return whether doubles of a column, or nested in it, are so large that digits before the point may be lost."""
    if pa.types.is_float64(column.type):
        largest = pc.max(pc.abs(column)).as_py()
        return largest is not None and largest >= _EXACT
    if pa.types.is_list(column.type):
        return _is_inexact(column.flatten())
    return pa.types.is_struct(column.type) and any(map(_is_inexact, column.flatten()))


def _is_kept(written: str) -> bool:
    """Return whether a double holds all digits before the point of this number.

    Programs write the shortest text of a double, which can differ from its exact value.
    """
    number, double = Decimal(written), float(written)
    return abs(number) < _EXACT or number in (Decimal(double), Decimal(repr(double)))


def _long_numbers(source: Any, format: str, schema: pa.Schema) -> Iterator[tuple[int, str, str]]:
    """Read a text again, and yield long numbers in columns of doubles: the row, the column, and the digits."""
    if isinstance(source, _WatchedText):
        if source.has_long_numbers:
            raise SourceError(
                "the text has numbers with 16 digits or more before the point, which a double may round: "
                "write the text to a file and publish that, since it has to be read twice"
            )
        return
    if format == "csv":
        yield from _csv_numbers(source, schema)
        return
    for row, line in _json_lines(source):
        for column, value in _json_numbers(line, pa.struct(schema), ()):
            yield row, ".".join(column), str(value)


def _csv_numbers(path: str, schema: pa.Schema) -> Iterator[tuple[int, str, str]]:
    doubles = [field.name for field in schema if pa.types.is_float64(field.type)]
    row = 2  # the first is the header
    for batch in _open_csv(path, column_types=dict.fromkeys(doubles, pa.string())):
        for name, column in zip(schema.names, batch.columns, strict=True):
            if name in doubles:
                is_long = pc.match_substring_regex(column, r"^\s*[+-]?[0-9]{16,}(\.[0-9]*)?\s*$").fill_null(False)
                for index in pc.indices_nonzero(is_long).to_pylist():
                    yield row + index, name, column[index].as_py().strip()
        row += batch.num_rows


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line. Raise SourceError for a line that is not JSON in UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    yield number, json.loads(text, parse_float=_number)
                except UnicodeDecodeError:
                    raise SourceError(f"row {number} is not UTF-8") from None
                except ValueError as error:
                    raise SourceError(f"row {number} is not valid JSON: {getattr(error, 'msg', error)}") from None


def _json_numbers(
    value: Any, type_: pa.DataType, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int | Decimal]]:
    """Yield the numbers without exponent in columns of doubles, with the names of their columns and fields."""
    if pa.types.is_float64(type_) and type(value) in (int, Decimal):
        yield path, value
    elif pa.types.is_struct(type_) and isinstance(value, dict):
        for field in type_.fields:
            yield from _json_numbers(value.get(field.name), field.type, (*path, field.name))
    elif pa.types.is_list(type_) and isinstance(value, list):
        for element in value:
            yield from _json_numbers(element, type_.value_type, path)


def _number(written: str) -> float | Decimal:
    """Return the exact value of a number of JSON, or a double if it has an exponent."""
    return float(written) if "e" in written.lower() else Decimal(written)


class _WatchedText(io.RawIOBase):
    """A text that can be read only once. It is searched for numbers of so many digits that doubles round them."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._unread = b""  # bytes that were only peeked at
        self._before = b""  # a number can begin in one piece and end in the next
        #: Whether there may have been such numbers so far.
        self.has_long_numbers = False

    def peek(self, size: int) -> bytes:
        """Return the next `size` bytes, or all that remain if there are fewer, which are read later."""
        self._unread += self._source.read(max(0, size - len(self._unread)))
        return self._unread[:size]

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        # The first block must be whole, since types are inferred from it. libarrow reads whole blocks.
        if size < 0:
            return self.readall()
        text = self.peek(size)
        self._unread = self._unread[size:]
        if not self.has_long_numbers:
            searched = self._before + text
            is_suspect = b"0" * 16 in searched.translate(_ALL_DIGITS_AS_0)  # ten times as fast as the expression
            self.has_long_numbers = is_suspect and _LONG_NUMBER.search(searched) is not None
            self._before = searched[-64:]
        return text


@contextmanager
def _text_errors(name: str, source: Any, format: str) -> Iterator[None]:
    """Convert errors of libarrow's parsers into SourceError that names the file and, if it can be found, the row."""
    try:
        yield
    except pa.ArrowException as error:
        kind = "CSV" if format == "csv" else "JSON lines"
        file = repr(source) if isinstance(source, str) else name
        why = _located(source, format) or str(error)
        if "CSV conversion error to" in why:
            why += (
                ". Types come from the first 16 MB. No word such as NA stands for null: write nothing for a missing "
                "value, without quotes, or read the file with types of your choice and publish the table"
            )
        raise concealed(name, f"{file} cannot be read as {kind}: {why}", f"the text is not valid {kind}") from error


def _located(source: Any, format: str) -> str | None:
    """Read a file again for an error that names the row. Return its text, or None if that finds no error."""
    if not isinstance(source, str):
        return None
    try:
        if format == "jsonl":
            return _changed_type(source)
        for _ in _open_csv(source, use_threads=False):
            pass
    except (pa.ArrowException, SourceError) as error:
        return str(error)
    return None


def _changed_type(path: str) -> str | None:
    """Return a sentence about the first value of JSON lines that does not have the type of its column, or None.

    Raises SourceError for a line that is not JSON.
    """
    try:
        types = dict(_json_types(pa.struct(_open_json(path).schema), ()))
    except pa.ArrowException:  # Two values in the first block have different types.
        types = {}
    first: dict[tuple[str, ...], tuple[str, int]] = {}
    for row, line in _json_lines(path):
        if not isinstance(line, dict | None):
            return f"row {row} is {_KINDS[type(line)]} instead of an object"
        for column, value in _json_values(line, ()):
            kind = _KINDS[type(value)]
            known_kind, known_row = first.setdefault(column, (kind, row))
            where = f"in column {'.'.join(name for name in column if name != _ELEMENT)!r}"
            if kind != known_kind:
                return f"row {row} has {kind} {where}, and row {known_row} has {known_kind}"
            if types and (expected := _unexpected(value, types.get(column))) is not None:
                return f"row {row} has {kind} {where}, and the first 16 MB have {expected}"
    return None


def _unexpected(value: Any, type_: pa.DataType | None) -> str | None:
    """Return what the first block has instead of `value`, or None if the value has the type of the column."""
    if type_ is None:
        return "no such column"
    if pa.types.is_null(type_):
        return "only null there"
    is_integer = type(value) is int and -(1 << 63) <= value < 1 << 63
    return "only integers of 64 bits there" if pa.types.is_int64(type_) and not is_integer else None


def _json_types(type_: pa.DataType, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield the types of all columns and, nested in them, of all fields and elements."""
    yield path, type_
    if pa.types.is_struct(type_):
        for field in type_.fields:
            yield from _json_types(field.type, (*path, field.name))
    elif pa.types.is_list(type_):
        yield from _json_types(type_.value_type, (*path, _ELEMENT))


def _json_values(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of all columns and, nested in them, of all fields and elements, without those that are null."""
    if value is None:
        return
    if path:
        yield path, value
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _json_values(child, (*path, name))
    elif isinstance(value, list):
        for child in value:
            yield from _json_values(child, (*path, _ELEMENT))


def _without_times(guessed: pa.DataType) -> pa.DataType:
    """Replace inferred timestamps in a type by strings: for text that looks like a time, libarrow drops the zone."""
    if pa.types.is_timestamp(guessed):
        return pa.string()
    if pa.types.is_list(guessed):
        return pa.list_(_without_times(guessed.value_type))
    if pa.types.is_struct(guessed):
        return pa.struct([field.with_type(_without_times(field.type)) for field in guessed.fields])
    return guessed
