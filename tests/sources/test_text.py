"""CSV and JSON lines as sources in Python: published by a server, and put into a node."""

from __future__ import annotations

import codecs
import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date, datetime, time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.csv
import pytest

import dissociated as dis
from dissociated.datasets.csv_blocks import csv_blocks
from dissociated.datasets.text import open_text
from dissociated.errors import DissociatedError, SourceError
from support.helpers import case
from support.processes import run_script

ROWS: dict[str, list[Any]] = {"id": [1, 2], "name": ["Ann", "Bob"], "since": [date(2024, 1, 31), None]}


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    with dis.connect(server.catalog_uri) as client:
        yield client


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "customers.csv"
    path.write_text("id,name,since\n1,Ann,2024-01-31\n2,Bob,\n")
    return path


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_csv_file_is_published_and_read_again_and_again(
    server: dis.Server, client: dis.Client, csv: Path, transport: str
) -> None:
    server.publish("customers", str(csv))
    for _ in range(2):
        assert client.read("customers", transport=transport).read_all().to_pydict() == ROWS
    columns = client.read("customers", columns=["name"], filter=("id", ">", 1), transport=transport).read_all()
    assert columns.to_pydict() == {"name": ["Bob"]}


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson"])
def test_json_lines_are_put_with_their_strings(client: dis.Client, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"events{ending}"
    path.write_text('{"at": "2024-01-31T10:00:00+01:00", "n": 1}\n{"n": 2}\n')
    assert client.put("events", path) == 2
    table = client.read("events").read_all()
    assert table.schema.field("at").type == pa.string()
    assert table.to_pydict() == {"at": ["2024-01-31T10:00:00+01:00", None], "n": [1, 2]}


def test_a_put_of_csv_survives_its_file(client: dis.Client, csv: Path) -> None:
    assert client.put("customers", csv) == 2
    assert client.put("customers", csv, mode="append") == 2
    csv.unlink()
    assert client.read("customers").read_all().to_pydict() == {name: values * 2 for name, values in ROWS.items()}


def test_a_file_that_was_modified_is_not_read(server: dis.Server, client: dis.Client, csv: Path) -> None:
    server.publish("customers", csv)
    assert client.read("customers").read_all().num_rows == 2
    csv.write_text("id,name,since\n3,Eve,2024-02-01\n")
    with pytest.raises(DissociatedError, match="was modified after it was published"):
        client.read("customers").read_all()
    server.publish("customers", csv)
    assert client.read("customers").read_all()["name"].to_pylist() == ["Eve"]
    csv.write_text("")
    with pytest.raises(SourceError, match=r"customers.csv': the file is empty"):
        server.publish("customers", csv)


LONG = 2**64 - 1  # no double holds it
DECIMAL = "12345678901234567.89"  # nor this
MEGABYTE = f'{{"a": 1, "b": "{"x" * (1 << 20)}"}}\n'


@pytest.mark.parametrize(
    ("ending", "content", "why"),
    [
        ("csv", "", r"wrong.csv': the file is empty"),
        ("csv", "a,b\n1,2\n3\n", r"wrong.csv' cannot be read as CSV: .*Row #3: Expected 2 columns, got 1: 3"),
        (
            "csv",
            "a\n" + f"{10**14}\n" * (9 << 17) + "one\n",
            r"Row #1179650: .* int64: invalid value 'one'. .* No word such as NA stands for null",
        ),
        ("jsonl", '{"a": 1}\n\n{"a":\n', r"wrong.jsonl' cannot be read as JSON lines: row 3 is not valid JSON"),
        ("jsonl", '{"a": 1}\n\n{"a": "x"}\n', r"row 3 has a string in column 'a', and row 1 has a number"),
        (
            "jsonl",
            '{"a": [{"b": 1}, {"b": true}]}\n',
            r"row 1 has true or false in column 'a.b', and",
        ),
        (
            "jsonl",
            MEGABYTE * 17 + '{"a": 1.5}',
            r"row 18 has a number in column 'a', .* only integers of 64 bits",
        ),
        ("jsonl", MEGABYTE * 17 + '{"c": 1}', r"row 18 has a number in column 'c', and the first 16 MB have no such"),
        ("csv", f"a,b\n1,1.5\n,{LONG}\n", rf"row 3 of '.*wrong.csv' has the number {LONG} in column 'b'"),
        ("csv", f"a\n1.5\n{-(2**53) - 1}\n", rf"row 3 of .* has the number {-(2**53) - 1} in column 'a'"),
        ("csv", f"a,b\n1,0.1\n2,{DECIMAL}\n", rf"row 3 of .* has the number {DECIMAL} in column 'b'"),
        ("jsonl", f'{{"a": [{{"b": 1}}, {{"b": {LONG}}}]}}', rf"row 1 of .* has the number {LONG} in column 'a.b'"),
        ("jsonl", f'{{"a": 1e300}}\n{{"a": {DECIMAL}}}', rf"row 2 of .* has the number {DECIMAL} in column 'a'"),
        ("csv", "a;b\n1;x\n".encode("utf-16"), r"wrong.csv' cannot be read as CSV: .* UTF-16 or UTF-32: write"),
        ("csv", codecs.BOM_UTF32_BE + "a;b\n1;x\n".encode("utf-32-be"), "in UTF-16 or UTF-32: write it in UTF-8"),
    ],
    ids=[
        *("empty", "odd", "late", "json", "changed", "changed within", "changed late", "new"),
        *("long", "mixed", "decimal", "nested", "decimal of JSON", "UTF-16", "UTF-32"),
    ],
)
def test_text_that_cannot_be_read_is_refused(
    client: dis.Client, tmp_path: Path, ending: str, content: str | bytes, why: str
) -> None:
    path = tmp_path / f"wrong.{ending}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SourceError, match=why):
        client.put("wrong", path)
    assert "wrong" not in client


ROW = f'{{"a": "{"x" * ((1 << 20) - 10)}"}}\n'  # of 1 MiB
BLOCK = ROW * 16


READ_EACH = """
import re, sys
import dissociated as dis
from dissociated.errors import SourceError
server = dis.Server([], catalog=None)
for path in sys.argv[1:]:
    try:
        server.publish("rows", path)
        print(server.dataset("rows").open_reader().read_all().num_rows, "rows", flush=True)
        server.drop("rows")
    except SourceError as error:
        print(re.split(" where|, which", str(error))[0], flush=True)
"""


@pytest.mark.usefixtures("forks")
def test_rows_are_read_but_where_libarrow_would_crash(tmp_path: Path) -> None:
    """libarrow parses blocks of 16 MiB, each from the line on that its first byte belongs to."""
    deep, escaped = '{"b": ' * 20_000 + "1" + "}" * 20_000, r"\\\"" + "[" * 5_000
    cases: dict[str, tuple[str, str]] = {
        "first": ("\n \r\n\t null\n" + ROW, "row 3 is null"),
        "only": ("\ufeffnull", "row 1 is null"),
        "second block": (BLOCK + "null\n" + ROW, "row 17 is null"),
        "third block": (BLOCK * 2 + "\nnull", "row 34 is null"),
        "across blocks": (ROW * 15 + ROW[:-6] + '"}\nnull\n' + ROW, "row 17 is null"),
        "deep": ('{"b": 1}\n' * 500 + deep, "row 501 is nested more than 2,000 levels deep"),
        "not closed": (ROW + '{"b": ' + "[" * 20_000, "row 2 is nested more than 2,000 levels deep"),
        "deep across blocks": (
            ROW * 15 + ROW[:-9_000] + '"}\n' + deep + "\n" + ROW,
            "row 17 is nested more than 2,000 levels deep",
        ),
        "many brackets": ('{"a": [' + "[], " * 5_000 + "[]]}\n", "1 rows"),
        "brackets in strings": ('{"a": "' + escaped + '"}\n' + '{"a": "' + escaped + '"}\n', "2 rows"),
        "before a block": (ROW * 15 + ROW[:-8] + '"}\nnull\n' + ROW, "18 rows"),
        "after a row": (BLOCK + ROW + "null\n", "18 rows"),
    }
    paths = [tmp_path / f"{name}.jsonl" for name in cases]
    for path, (content, _) in zip(paths, cases.values(), strict=True):
        path.write_text(content)
    ended = run_script(READ_EACH, *paths)
    expected = [
        what.replace(" is ", f" of {str(path)!r} is ") for path, (_, what) in zip(paths, cases.values(), strict=True)
    ]
    assert ended.stdout.splitlines() == expected
    assert ended.returncode == 0


def test_quoted_line_breaks_split_no_rows_between_blocks(client: dis.Client, tmp_path: Path) -> None:
    """Libarrow parses blocks of 16 MiB, and the first ends within a value."""
    value, rows = "\n".join("q" * 500), 18_000
    text = "a\n" + f'"{value}"\n' * rows
    path = tmp_path / "lines.csv"
    path.write_text(text)
    assert client.put("lines", path) == rows
    for table in client.read("lines").read_all(), open_text("-", io.BytesIO(text.encode()), "csv").read_all():
        assert table.num_rows == rows
        assert table["a"].unique().to_pylist() == [value]


def test_a_quoted_line_break_between_blocks_keeps_its_line_feed(tmp_path: Path) -> None:
    """Libarrow parses blocks of 16 MiB. The first ends with the CR of a CR LF."""
    begin = "id,text\r\n" + f"1,{'x' * 1020}\r\n" * 16_000 + '2,"'
    value = "y" * ((1 << 24) - len(begin) - 1) + "\r\nsecond line"
    text = f'{begin}{value}"\r\n3,last\r'.encode()
    path = tmp_path / "lines.csv"
    path.write_bytes(text)
    for source in str(path), io.BytesIO(text):
        assert open_text("-", source, "csv").read_all()["text"][-2:].to_pylist() == [value, "last"]


def test_blank_lines_of_a_single_column_are_null(client: dis.Client, tmp_path: Path) -> None:
    """Libarrow's CSVWriter writes null as nothing. Several columns have a comma in every row."""
    path = tmp_path / "column.csv"
    values = [None, 1, None, *[2] * 100_000, None, None]
    pyarrow.csv.write_csv(pa.table({"a": pa.array(values, pa.int64())}), path)
    assert path.read_bytes().startswith(b'"a"\n\n1\n\n2\n')
    texts: dict[str, dict[str, list[Any]]] = {
        path.read_text(): {"a": values},
        '"a"\n"x"\n\n""\nNA\n': {"a": ["x", None, "", "NA"]},
        "a\n1\n\nNA\n": {"a": ["1", None, "NA"]},
        "\ufeff\r\n\r\n'a'\r\n1\r\n\r\n": {"'a'": [1, None]},
        '\n"a,\nb"\n\n1': {"a,\nb": [None, 1]},
        "\na,b\n\n1,2\n\n": {"a": [1], "b": [2]},
    }
    for text, expected in texts.items():
        with case(text[:20]):
            path.write_text(text, newline="")
            assert client.put("column", path) == len(next(iter(expected.values())))
            assert client.read("column").read_all().to_pydict() == expected
            assert open_text("-", io.BytesIO(text.encode()), "csv").read_all().to_pydict() == expected


@pytest.mark.parametrize("columns", [1, 2])
def test_csv_keeps_each_text_null_and_nan(client: dis.Client, tmp_path: Path, columns: int) -> None:
    """Words that other programs write for null are texts, also if a column has no other values."""
    path = tmp_path / "values.csv"
    values: dict[str, list[Any]] = {
        "texts": ["x", "", None, "NA", "nan"],
        "words": ["NA", "null", "N/A", "NaN", "n/a"],
        "NaN": [1.5, float("nan"), None, float("-inf"), 0.25],
        "dates": [date(2020, 1, 1), None, None, None, date(1970, 1, 1)],
    }
    for name, column in values.items():
        with case(name):
            table = pa.table({name: column, "n": pa.array([0, 1, 2, 3, 4])}).select(range(columns))
            pyarrow.csv.write_csv(table, path)
            client.put("values", path)
            piped = open_text("-", io.BytesIO(path.read_bytes()), "csv").read_all()
            for read in client.read("values").read_all(), piped:
                assert repr(read[name].to_pylist()) == repr(column)
    path.write_text("n,code,word\n1,,NA\n2,,\nNA,,NULL\n")
    assert client.put("words", path) == 3
    unquoted = {"n": ["1", "2", "NA"], "code": [None] * 3, "word": ["NA", None, "NULL"]}
    assert client.read("words").read_all().to_pydict() == unquoted


@pytest.mark.parametrize("columns", [1, 2])
def test_an_empty_quoted_value_is_null_unless_its_column_is_text(
    client: dis.Client, tmp_path: Path, columns: int
) -> None:
    """Programs that write quotes around each value write a missing number so."""
    path = tmp_path / "quoted.csv"
    zone, utc = "2020-01-01T10:00:00", ZoneInfo("UTC")
    cases: dict[str, tuple[str, list[Any]]] = {
        "int64": ("5, 7 ", [5, 7]),
        "double": ("1.5,nan,-inf,2e3", [1.5, float("nan"), float("-inf"), 2000.0]),
        "bool": ("true,False", [True, False]),
        "date32[day]": ("2020-01-31,1969-12-31", [date(2020, 1, 31), date(1969, 12, 31)]),
        "time32[s]": ("10:11,10:11:12", [time(10, 11), time(10, 11, 12)]),
        "timestamp[s]": ("2020-01-31 10:00,2020-01-31", [datetime(2020, 1, 31, 10), datetime(2020, 1, 31)]),
        "timestamp[s, tz=UTC]": (f"{zone}+01:00,{zone}Z", [datetime(2020, 1, 1, hour, tzinfo=utc) for hour in (9, 10)]),
        "string": ("x,NA", ["x", "NA"]),
    }
    for kind, (written, values) in cases.items():
        rows = [f'"{value}"' for value in written.split(",")] + ['""', ""]
        text = "".join(row + ',"x"\n' * (columns - 1) + "\n" * (2 - columns) for row in ["a", *rows])
        path.write_text(text)
        client.put("quoted", path)
        expected = [*values, "" if kind == "string" else None, None]
        for read in client.read("quoted").read_all(), open_text("-", io.BytesIO(text.encode()), "csv").read_all():
            with case(kind):
                assert str(read.schema.field("a").type) == kind
                assert repr(read["a"].to_pylist()) == repr(expected)


def test_an_empty_quoted_value_may_be_followed_by_blocks_of_numbers(client: dis.Client, tmp_path: Path) -> None:
    path = tmp_path / "quoted.csv"
    path.write_text(f'a,b,b\n"{LONG}",1,\n"",,""\n"1.5","",x\n')
    with pytest.raises(SourceError, match=f"row 2 of .* has the number {LONG} in column 'a'"):
        client.put("quoted", path)
    text = 'a,b\n"",""\n"1",\n' + f'"2","{"x" * 1_000}"\n' * 17_000
    read = open_text("-", io.BytesIO(text.encode()), "csv").read_all()
    assert read["a"].to_pylist() == [None, 1, *[2] * 17_000]
    assert read["b"].to_pylist() == ["", None, *["x" * 1_000] * 17_000]
    path.write_text(f'{text}"NA",\n')
    with pytest.raises(
        SourceError, match=r"column 'a': .* int64: invalid value 'NA'.* No word such as NA stands for null"
    ):
        client.put("quoted", path)


def test_an_empty_quoted_number_may_come_late(client: dis.Client, tmp_path: Path) -> None:
    """The first 16 MB have none, and programs may write quotes around each value, or around missing ones only."""
    path = tmp_path / "late.csv"
    for quote in ('"', ""):
        number = f"{quote}7{quote}"
        text = "a,b\n" + f'{number},"{"x" * 1_000}"\n' * 17_200
        path.write_text(f'{text}"",""\n{number},\n')
        with case(quote):
            client.put("late", path)
            read = client.read("late").read_all()
            assert read["a"].to_pylist() == [*[7] * 17_200, None, 7]
            assert read["b"].to_pylist()[-3:] == ["x" * 1_000, "", None]
    path.write_text(f'{text.replace("a,b", "a,d").replace("x" * 1_000, "0.5" + "0" * 1_000)}"",0.5\n1,{LONG}\n')
    with pytest.raises(SourceError, match=f"has the number {LONG} in column 'd'"):
        client.put("late", path)
    path.write_text(f'{text}"",\nNA,\n')
    with pytest.raises(SourceError, match=r"Row #17202: .* invalid value ''.* No word such as NA stands for null"):
        client.put("late", path)


@pytest.mark.parametrize("begin", ["a\n", '\ufeff"q\n"\n', "x" * (1 << 18) + "\n", ('"' * 100 + "\n") * 2_700])
def test_csv_that_ends_within_quotes_is_refused(tmp_path: Path, begin: str) -> None:
    """The quotes that decide can be outside of the last quarter of a megabyte, which is searched at first."""
    path = tmp_path / "rows.csv"
    ends: dict[str, bool] = {
        '"': True,
        '"hel': True,
        '"12': True,
        '"a ""b"" \n': True,
        '"a""': True,
        '"\r\n': True,
        '"a"""': False,
        '5"': False,
        '"a"b"c\n"x': True,
        '"a"b"c\n': False,
        '"a\n"\n': False,
        '"\n"\n': False,
        '"a\n"\r\n""': False,
        '"a\n"\n"b,"\n': False,
        '"a\n"\n"b,"\n"c,': True,
    }
    for end, is_open in ends.items():
        path.write_text(text := begin + end, newline="")
        for source in str(path), io.BytesIO(text.encode()):
            with case(end), ExitStack() as refused:
                if is_open:
                    named = "'.*rows.csv'" if isinstance(source, str) else "piped"
                    why = f"{named} cannot be read as CSV: a quoted value begins and does not end"
                    refused.enter_context(pytest.raises(SourceError, match=why))
                open_text("piped", source, "csv").read_all()


def test_the_end_of_csv_is_searched_quickly(tmp_path: Path) -> None:
    """Libarrow refuses values that are longer than two of its blocks, so that an older quote does not count."""
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,"')
    with path.open("r+b") as file:
        file.seek(1 << 28)  # the bytes between take no room
        file.write(b"\n1,x\n")
    begin = _bytes_read()
    csv_blocks(str(path))
    assert _bytes_read() - begin < 1 << 26
    path.write_text('a\n"x"\n' + '"b,"\n' * 200_000)  # each quote could begin a value, or end it
    calls: list[str] = []
    sys.setprofile(lambda _frame, event, _what: calls.append(event))
    try:
        csv_blocks(str(path))
        csv_blocks(io.BytesIO(path.read_bytes())).read(1 << 24)
    finally:
        sys.setprofile(None)
    assert len(calls) < 1_000


def _bytes_read() -> int:
    """Return the bytes that this process has read by `read` and `pread`."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_csv_in_another_encoding_is_binary(client: dis.Client, tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("a\nZürich\n".encode("latin-1"))
    client.put("latin", path)
    assert client.dataset("latin").schema.field("a").type == pa.binary()


def test_large_numbers_that_a_double_holds_are_read(client: dis.Client, tmp_path: Path) -> None:
    values = [2.0**63, 1e300, 2.0**70, None, -1.5]
    written = ["9223372036854775808.00", "1e300", "1180591620717411300000", "", "-1.5"]  # the third as JavaScript does
    path = tmp_path / "large.csv"
    path.write_text("\n".join(["n,a", *(f"{n},{text}" for n, text in enumerate(written))]))
    client.put("large", path)
    assert client.read("large").read_all()["a"].to_pylist() == values


def test_large_numbers_of_a_pipe_are_read_unless_a_double_rounds_them() -> None:
    """Libarrow reads 16 MiB at a time, so the last integer comes in two pieces."""
    large = "a,b\n1e300,0.1234567890123456\n9007199254740993e0,-1234567890123456e3\n"
    rows = open_text("-", io.BytesIO(large.encode()), "csv").read_all().to_pydict()
    assert rows == {"a": [1e300, 2.0**53], "b": [0.1234567890123456, -1234567890123456e3]}
    for written in (f"{LONG}\n", f"{-(2**53) - 1}\n", f"{DECIMAL}\n", "1.5\n" * ((1 << 22) - 4) + f"{LONG}\n"):
        with pytest.raises(SourceError, match="write the text to a file"):
            open_text("-", io.BytesIO(f"a\n1.5\n{written}".encode()), "csv").read_all()


def test_a_reader_of_a_served_text_is_told_its_kind_of_error(
    server: dis.Server, client: dis.Client, tmp_path: Path
) -> None:
    path = tmp_path / "secret.csv"
    path.write_text(f"a\n{LONG}\n")
    server.publish("served", path)
    with pytest.raises(DissociatedError, match=r"'served' failed \(a number is too large\)") as refused:
        client.read("served").read_all()
    assert str(LONG) not in str(refused.value)
