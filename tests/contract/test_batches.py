"""Some of the batches: those alone move, with the dictionaries that they need, whatever is published."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis

from .conftest import Route
from .test_columns import ROWS, SOURCES, TABLE, moved

EACH = ROWS // 4
#: Four batches, each of which has a dictionary of its own.
WORDS = [pa.record_batch({"n": [n, n + 1], "d": pa.array([f"word {n}"] * 2).dictionary_encode()}) for n in range(4)]
RANGES = [(0, 1), (1, 3), (3, 4), (2, 9), (0, 0), (7, 9)]


def identifier(ticket: bytes, asked: str) -> bytes:
    """As docs/architecture.md has it."""
    return b"DISSCOL\x01" + len(ticket).to_bytes(4, "little") + ticket + asked.encode()


@pytest.mark.parametrize("source", [name for name in SOURCES if "reader" not in name])
def test_of_every_source(quick: Route, source: str, tmp_path: Path) -> None:
    quick.publish(SOURCES[source](tmp_path / "source"))
    sent = pq.ParquetFile(tmp_path / "source").iter_batches() if source == "parquet" else TABLE.to_batches()
    batches = [*sent]
    for first, stop in RANGES:
        arrived = quick.open(batches=(first, stop)).read_all()
        arrived.validate(full=True)
        assert arrived == pa.Table.from_batches(batches[first:stop], batches[0].schema)


@pytest.mark.parametrize("source", ["batches", "ipc stream", "ipc file with deltas"])
@pytest.mark.parametrize("columns", [None, ["d"], ["n"], []], ids=str)
def test_dictionaries_that_change_come_along(
    quick: Route, source: str, columns: list[str] | None, tmp_path: Path
) -> None:
    table = pa.Table.from_batches(WORDS)
    if source == "batches":
        quick.publish(table)
    elif source == "ipc stream":
        with pa.ipc.new_stream(tmp_path / "words", table.schema) as writer:
            writer.write_table(table)
        quick.publish(tmp_path / "words")
    else:
        grown = [pa.array(["a", "b", "c", "d"][: n + 1]) for n in range(4)]
        some = [pa.record_batch({"d": pa.DictionaryArray.from_arrays([n], words)}) for n, words in enumerate(grown)]
        table = pa.Table.from_batches(some)
        columns = ["d"] if columns is None else [name for name in columns if name == "d"]
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        with pa.ipc.new_file(tmp_path / "words", table.schema, options=options) as writer:
            writer.write_table(table)
        quick.publish(tmp_path / "words")
    wanted = table.to_batches()
    for first, stop in RANGES:
        arrived = quick.open(columns=columns, batches=(first, stop))
        names = table.schema.names if columns is None else columns
        expected = [batch.select(names).to_pylist() for batch in wanted[first:stop]]
        assert [batch.to_pylist() for batch in arrived] == expected


@pytest.mark.parametrize("batches", [(0, 2), (3, 4)], ids=str)
def test_over_every_way(route: Route, batches: tuple[int, int]) -> None:
    first, stop = batches
    for source in (TABLE, TABLE.to_reader):
        route.publish(source)
        assert route.open(batches=batches).read_all() == TABLE[first * EACH : stop * EACH]
        assert route.open(columns=["n"], batches=batches).read_all() == TABLE.select(["n"])[first * EACH : stop * EACH]


def test_bodies_of_other_batches_do_not_move(quick: Route) -> None:
    quick.publish(pa.Table.from_batches([pa.record_batch({"n": range(8000)})] * 4))
    count = moved(quick, identifier(quick.ticket(), '{"batches": [2, 3]}'))
    assert count.inline + count.leased_bytes == 8 * 8000


def test_of_a_server_that_cannot_choose(direct: Route) -> None:
    direct.publish(TABLE)
    uri = direct.uris()
    assert isinstance(uri, str)
    plain = uri.replace("&select=1", "")
    arrived = direct.request(plain, direct.ticket(), columns=["n"], batches=(1, 3)).read_all()
    assert arrived == TABLE.select(["n"])[EACH : 3 * EACH]


@pytest.mark.parametrize("batches", [(-1, 1), (2, 1)], ids=str)
def test_what_is_no_range_is_refused(direct: Route, batches: tuple[int, int]) -> None:
    direct.publish(TABLE)
    with pytest.raises(dis.errors.OptionError, match=re.escape(f"not {batches}")):
        direct.open(batches=batches)


def test_a_live_stream_that_is_shared_has_none_by_number() -> None:
    with dis.Server(["tcp://127.0.0.1:0"], catalog=None) as server:
        server.publish("data", TABLE.to_reader(), live=dis.Live())
        (uri,) = server.locations("data")
        with pytest.raises(dis.errors.RemoteError, match="the batches of 'data' have no numbers"):
            dis.open_stream(uri, server.ticket("data"), batches=(0, 1)).read_all()
