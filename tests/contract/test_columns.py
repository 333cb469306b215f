"""Selected columns: only these are sent and read, for every kind of source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.protocol.message import Message, Run
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE, case

from .conftest import Route

ROWS = 400
#: Columns that no test below selects. Each of their buffers is far larger than all other columns together.
LARGE = 200_000


def _table() -> pa.Table:
    long = [os.urandom(LARGE // ROWS).hex() for _ in range(ROWS)]
    columns = {
        "before": long,
        "n": pa.array([None if n % 7 == 0 else n for n in range(ROWS)]),
        "unused words": pa.array(long).dictionary_encode(),
        "d": pa.array([f"word {n % 5}" for n in range(ROWS)]).dictionary_encode(),
        "v": pa.array([f"a view that is longer than twelve bytes {n % 3}" for n in range(ROWS)], pa.string_view()),
        "unused views": pa.array(long, pa.string_view()),
        "t": pa.array([{"a": [n], "b": None} if n % 3 else None for n in range(ROWS)]),
        "after": pa.array([{"deep": [one]} for one in long]),
    }
    whole = pa.table(columns, metadata={"kept": "yes"})
    # Slices of a view array share their characters. Give each batch its own.
    return pa.Table.from_batches(
        [
            pa.record_batch(
                [pa.array(one.to_pylist(), one.type) if one.type == pa.string_view() else one for one in batch.columns],
                schema=whole.schema,
            )
            for batch in whole.to_batches(max_chunksize=ROWS // 4)
        ]
    )


TABLE = _table()
STORED = TABLE.drop_columns(["v", "unused views"])  # Parquet returns these columns as other types.


def ipc_stream(path: Path, **options: Any) -> Path:
    with pa.ipc.new_stream(path, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE)
    return path


def ipc_file(path: Path, **options: Any) -> Path:
    with pa.ipc.new_file(path, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE)
    return path


def parquet(path: Path) -> Path:
    pq.write_table(STORED, path, row_group_size=ROWS // 4)
    return path


SOURCES: dict[str, Callable[[Path], Any]] = {
    "table": lambda path: TABLE,
    "callable": lambda path: TABLE.to_reader,
    "reader": lambda path: TABLE.to_reader(),
    "reader of a stream": lambda path: pa.ipc.open_stream(ipc_stream(path)),
    "ipc stream": ipc_stream,
    "ipc stream, compressed": lambda path: ipc_stream(path, compression="zstd"),
    "ipc stream, version 4": lambda path: ipc_stream(path, metadata_version=pa.ipc.MetadataVersion.V4),
    "ipc file": ipc_file,
    "ipc file, deltas": lambda path: ipc_file(path, emit_dictionary_deltas=True, unify_dictionaries=False),
    "parquet": parquet,
}
#: Sources that are read anew for each client, or only once.
LIVE = ("callable", "reader", "reader of a stream", "parquet")
SELECTIONS = [["n"], ["d"], ["t", "d"], ["v"], ["n", "d", "v", "t"], []]


class Moved(NamedTuple):
    """Bytes of metadata and of inline bodies, the number of leased addresses, and their bytes."""

    metadata: int
    inline: int
    leased: int
    leased_bytes: int


def moved(route: Route, identifier: bytes) -> Moved:
    """Count the received messages of a stream."""
    (text,) = [route.uris()]
    assert isinstance(text, str)
    uri = Uri.parse(text)
    metadata = inline = leased = leased_bytes = 0
    with transport(uri.scheme).connect(uri, PATIENCE) as connection:
        connection.send([Message(uri.require_want_data(), (identifier,))], PATIENCE)
        ended = False
        while not ended:
            incoming = connection.receive(PATIENCE, lambda tag, length: bytearray(length))
            assert incoming is not None
            for one in incoming.expand() if isinstance(incoming, Run) else (incoming,):
                if one.tag is None:
                    metadata += len(one.data)
                    ended = one.data[0] == 0
                elif one.tag >> 56 == 0:
                    inline += len(one.data)
                else:
                    numbers = memoryview(bytes(one.data)).cast("Q")[2:]
                    leased += sum(length > 0 for length in numbers[1::2])
                    leased_bytes += sum(numbers[1::2])
    return Moved(metadata, inline, leased, leased_bytes)


def identifier(ticket: bytes, columns: list[str]) -> bytes:
    """Return the identifier that docs/protocol.md defines."""
    names = ", ".join(f'"{name}"' for name in columns)
    return b"DISSREQ\x01" + len(ticket).to_bytes(4, "little") + ticket + f'{{"columns": [{names}]}}'.encode()


def selections(route: Route, source: str, path: Path) -> Iterator[tuple[pa.Table, list[str]]]:
    """Publish a source, again for each selection if it can be read only once."""
    sent = STORED if source == "parquet" else TABLE
    published = SOURCES[source](path)
    for columns in SELECTIONS:
        route.publish(SOURCES[source](path) if "reader" in source else published)
        with case((source, columns)):
            yield sent, [name for name in columns if name in sent.schema.names]


@pytest.mark.parametrize("source", SOURCES)
def test_of_every_source(either: Route, source: str, tmp_path: Path) -> None:
    for sent, columns in selections(either, source, tmp_path / "source"):
        arrived = either.open(columns=columns).read_all()
        arrived.validate(full=True)
        assert arrived.schema.names == [name for name in sent.schema.names if name in columns]
        assert arrived.schema.metadata == {b"kept": b"yes"}
        assert arrived.num_rows == ROWS
        assert arrived == sent.select(arrived.schema.names)


@pytest.mark.parametrize("source", SOURCES)
def test_bodies_of_other_columns_do_not_move(quick: Route, source: str, tmp_path: Path) -> None:
    for sent, columns in selections(quick, source, tmp_path / "source"):
        count = moved(quick, identifier(quick.ticket(), columns))
        buffers = 4 * 30  # more than four batches of these columns and their dictionaries have
        wanted = sum(sent[name].nbytes for name in columns) + 4 * 1000
        assert count.inline + count.leased_bytes <= wanted + 64 * buffers < LARGE / 4
        assert count.leased <= buffers
        if not columns:
            assert (count.inline, count.leased) == (0, 0)
        if quick.way.medium != "shm" or quick.way.bodies == "packed":
            assert count.leased == 0
        elif quick.way.bodies == "any" and columns and source not in LIVE:  # live sources send small batches inline
            assert count.leased > 0
            assert count.inline == 0


def test_metadata_of_other_columns_does_not_move(either: Route) -> None:
    either.publish(pa.Table.from_batches(pa.table({str(n): range(100) for n in range(300)}).to_batches(10)))
    count = moved(either, identifier(either.ticket(), ["7"]))
    assert count.metadata < 10 * 400 + 300 * 150  # ten batches, and the schema, which keeps its size


def test_two_servers_choose_the_same(arranged: Route) -> None:
    """Compare the selections of two servers. tests/contract/test_batches.py runs over every way."""
    for source, columns in product((TABLE, TABLE.to_reader), (["n"], ["t", "d"], [])):
        arranged.publish(source)
        assert arranged.open(columns=columns).read_all() == TABLE.select([name for name in "ndt" if name in columns])


def test_fields_are_chosen_like_columns(either: Route) -> None:
    either.publish(TABLE)
    arrived = either.open(options=dis.ReadOptions(included_fields=[3, 1, 3])).read_all()
    assert arrived == TABLE.select(["n", "d"])
    with pytest.raises(dis.errors.OptionError, match="field 8 does not exist: the schema has 8"):
        either.open(options=dis.ReadOptions(included_fields=[1, 8]))


def test_columns_that_share_a_name_come_together(either: Route) -> None:
    either.publish(pa.table([[1], [2], [3]], names=["a", "b", "a"]))
    arrived = either.open(columns=["a"]).read_all()
    assert arrived.schema.names == ["a", "a"]
    assert [column.to_pylist() for column in arrived.columns] == [[1], [3]]


def test_a_column_that_does_not_exist_is_named(arranged: Route) -> None:
    table = pa.table({"n": [1], "s": ["a"]})
    for source in (table, table.to_reader):
        arranged.publish(source)
        with pytest.raises(dis.errors.ColumnNotFound, match=r"no column 'x'; there are n, s"):
            arranged.open(columns=["n", "x"])


def test_a_reader_is_not_used_up_by_a_column_that_does_not_exist(either: Route) -> None:
    either.publish(TABLE.to_reader())
    with pytest.raises(dis.errors.ColumnNotFound):
        either.open(columns=["x"])
    assert either.open(columns=["n"]).read_all() == TABLE.select(["n"])


def test_of_a_server_that_cannot_choose(either: Route) -> None:
    """Read from a server whose URI does not offer selections: the client requests everything and selects by itself."""
    either.publish(TABLE)
    uri = either.uris()
    assert isinstance(uri, str)
    plain = uri.replace("&request=1", "")
    assert plain != uri
    for columns in (["n"], ["t", "d"], []):
        arrived = either.request(plain, either.ticket(), columns=columns).read_all()
        assert arrived == TABLE.select([name for name in "ndt" if name in columns])
    with pytest.raises(dis.errors.ColumnNotFound, match="no column 'x'; there are before, n"):
        either.request(plain, either.ticket(), columns=["x"])


def test_more_selections_than_are_kept(either: Route) -> None:
    wide = pa.table({str(n): [n] for n in range(40)})
    either.publish(wide)
    for n in (*range(40), 0):
        assert either.open(columns=[str(n)]).read_all() == wide.select([str(n)])


def test_a_selection_that_cannot_be_read_is_refused(either: Route) -> None:
    either.publish(TABLE)
    with pytest.raises(dis.errors.RemoteError, match="structured request that cannot be read"):
        either.request(either.uris(), identifier(either.ticket(), ["n"])[:-1])


def test_a_selection_needs_a_ticket_like_any_other(either: Route) -> None:
    either.publish(TABLE)
    with pytest.raises(dis.errors.RemoteError, match="no dataset has this ticket"):
        either.request(either.uris(), b"no such ticket", columns=["n"])
    with pytest.raises(dis.errors.DissociatedError, match="may not begin with"):
        either.servers[0].publish("other", TABLE, ticket=identifier(b"t", []))
