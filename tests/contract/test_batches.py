"""Selected batches: only these and the dictionaries that they need are sent, for every kind of source."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from support.helpers import case

from .conftest import Route
from .test_columns import ROWS, SOURCES, TABLE, moved

EACH = ROWS // 4
#: Four batches with a dictionary each.
WORDS = [pa.record_batch({"n": [n, n + 1], "d": pa.array([f"word {n}"] * 2).dictionary_encode()}) for n in range(4)]
RANGES = [(0, 1), (1, 3), (3, 4), (2, 9), (0, 0), (7, 9)]


def identifier(ticket: bytes, asked: str) -> bytes:
    """Return the identifier that docs/protocol.md defines."""
    return b"DISSREQ\x01" + len(ticket).to_bytes(4, "little") + ticket + asked.encode()


def test_of_every_source(either: Route, tmp_path: Path) -> None:
    for name in (name for name in SOURCES if "reader" not in name):
        either.publish(SOURCES[name](tmp_path / name))
        batches = [*(pq.ParquetFile(tmp_path / name).iter_batches() if name == "parquet" else TABLE.to_batches())]
        for first, stop in RANGES:
            arrived = either.open(batches=(first, stop)).read_all()
            arrived.validate(full=True)
            with case((name, first, stop)):
                assert arrived == pa.Table.from_batches(batches[first:stop], batches[0].schema)


def words(source: str, path: Path) -> tuple[pa.Table, Any]:
    """Provide batches with a dictionary each, and the ways to publish them."""
    table = pa.Table.from_batches(WORDS)
    if source == "batches":
        return table, table
    if source == "ipc stream":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
        return table, path
    grown = [pa.array(["a", "b", "c", "d"][: n + 1]) for n in range(4)]
    some = [pa.record_batch({"d": pa.DictionaryArray.from_arrays([n], words)}) for n, words in enumerate(grown)]
    table = pa.Table.from_batches(some)
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(path, table.schema, options=options) as writer:
        writer.write_table(table)
    return table, path


@pytest.mark.parametrize("source", ["batches", "ipc stream", "ipc file with deltas"])
def test_dictionaries_that_change_come_along(quick: Route, source: str, tmp_path: Path) -> None:
    table, published = words(source, tmp_path / "words")
    quick.publish(published)
    for columns, (first, stop) in product((None, ["d"], ["n"], []), RANGES):
        names = table.schema.names if columns is None else [name for name in columns if name in table.schema.names]
        arrived = quick.open(columns=None if columns is None else names, batches=(first, stop))
        expected = [batch.select(names).to_pylist() for batch in table.to_batches()[first:stop]]
        with case((columns, first, stop)):
            assert [batch.to_pylist() for batch in arrived] == expected


def test_two_servers_choose_the_same(arranged: Route) -> None:
    for source, (first, stop) in product((TABLE, TABLE.to_reader), ((0, 2), (3, 4))):
        arranged.publish(source)
        rows = slice(first * EACH, stop * EACH)
        assert arranged.open(batches=(first, stop)).read_all() == TABLE[rows]
        assert arranged.open(columns=["n"], batches=(first, stop)).read_all() == TABLE.select(["n"])[rows]


def test_over_every_way(route: Route) -> None:
    """Read some columns of some batches."""
    for source in (TABLE, TABLE.to_reader) if route.is_quick else (TABLE,):
        route.publish(source)
        arrived = route.open(columns=["t", "d"], batches=(1, 3)).read_all()
        assert arrived == TABLE.select(["d", "t"])[EACH : 3 * EACH]


def test_bodies_of_other_batches_do_not_move(quick: Route) -> None:
    quick.publish(pa.Table.from_batches([pa.record_batch({"n": range(8000)})] * 4))
    count = moved(quick, identifier(quick.ticket(), '{"batches": [2, 3]}'))
    assert count.inline + count.leased_bytes == 8 * 8000


def test_of_a_server_that_cannot_choose(either: Route) -> None:
    either.publish(TABLE)
    uri = either.uris()
    assert isinstance(uri, str)
    plain = uri.replace("&request=1", "")
    arrived = either.request(plain, either.ticket(), columns=["n"], batches=(1, 3)).read_all()
    assert arrived == TABLE.select(["n"])[EACH : 3 * EACH]


@pytest.mark.parametrize("batches", [(-1, 1), (2, 1)], ids=str)
def test_an_invalid_range_is_refused(either: Route, batches: tuple[int, int]) -> None:
    either.publish(TABLE)
    with pytest.raises(dis.errors.OptionError, match=re.escape(f"not {batches}")):
        either.open(batches=batches)


def test_a_live_stream_that_is_shared_has_none_by_number() -> None:
    with dis.Server(["tcp://127.0.0.1:0"], catalog=None) as server:
        server.publish("data", TABLE.to_reader(), live=dis.Live())
        (uri,) = server.locations("data")
        with pytest.raises(dis.errors.RemoteError, match="the batches of 'data' have no numbers"):
            dis.open_stream(uri, server.ticket("data"), batches=(0, 1)).read_all()
