"""Damaged segments that were committed: an error for readers over Flight, and no harm to the node."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import StagedSegment
from dissociated.control.version import NodeRecord, Part
from support.arrow_cases import stream_of
from support.helpers import commit_of
from support.processes import Start, run_script

GOOD = pa.table({"n": [1, 2, 3]})
ROWS = 100


def damaged(array: pa.Array, buffer: int, *values: int, to: type = np.int32) -> bytes:
    """Return the stream of an array with other values in one of its buffers, which pyarrow cannot build."""
    content = bytearray(stream_of(array))
    before = array.buffers()[buffer].to_pybytes()[: np.dtype(to).itemsize * len(values)]
    at = content.rindex(before)
    content[at : at + len(before)] = np.array(values, to).tobytes()
    return bytes(content)


STRINGS = pa.array(["some", "words"])
LISTS = pa.array([[1, 2], [3, 4, 5]])
VIEWS = pa.array(["a view of more than twelve bytes", "another view of more than twelve"], pa.string_view())
UNION = pa.UnionArray.from_dense(
    pa.array([0, 1, 0], pa.int8()), pa.array([0, 0, 1], pa.int32()), [pa.array([7, 8]), pa.array(["a"])]
)
WORDS = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int32()), pa.array(["a", "b"]))

#: Streams that would make libarrow, which trusts offsets and indices, read outside its buffers or abort.
DAMAGED = {
    "list offsets beyond the child": damaged(LISTS, 1, 0, 2, 5_000_000),
    "list offsets beyond the child, all of them": damaged(LISTS, 1, 5_000_000, 5_000_000, 5_000_000),
    "list offsets that go back": damaged(LISTS, 1, 0, 1 << 30, 5),
    "huge negative offsets": damaged(STRINGS, 1, -(1 << 31), 4, 9),
    "negative offsets": damaged(STRINGS, 1, -5, 4, 9),
    "string offsets beyond the text": damaged(STRINGS, 1, 0, 4, 1 << 30),
    "string offsets beyond the text in the middle": damaged(STRINGS, 1, 0, 1 << 30, 9),
    "type ids that the union has not": damaged(UNION, 1, 0, 7, 0, to=np.int8),
    "negative type ids": damaged(UNION, 1, 0, -7, 0, to=np.int8),
    "union offsets beyond the child": damaged(UNION, 2, 0, 1 << 30, 1),
    "dictionary indices beyond the dictionary": damaged(WORDS, 1, 1, 1 << 20, 1),
    "views beyond their buffer": damaged(VIEWS, 1, 32, 0, 0, 1 << 30),
}


def commit(uri: str, name: str, content: bytes) -> None:
    """Write a segment like a foreign program, and publish it."""
    with dis.connect(uri) as client:
        place = client.stage()
        (Path(place.directory) / f"{name}.arrows").write_bytes(content)
        segment = StagedSegment(f"{name}.arrows", place.node)
        client.commit(commit_of(name, [segment], pa.ipc.open_stream(content).schema))


def refused_by(uri: str) -> None:
    """Check that every damaged dataset raises an error, while the good one is still served."""
    with flight.FlightClient(uri) as client:
        for name in (*DAMAGED, *DAMAGED):
            info = client.get_flight_info(flight.FlightDescriptor.for_path(name))
            with pytest.raises(flight.FlightServerError, match="a record batch is not valid"):
                client.do_get(info.endpoints[0].ticket).read_all()
        info = client.get_flight_info(flight.FlightDescriptor.for_path("good"))
        assert client.do_get(info.endpoints[0].ticket).read_all() == GOOD


def test_what_is_damaged_harms_neither_a_node_nor_the_catalog_that_asks_it(tmp_path: Path, start: Start) -> None:
    catalog = start("catalog", "--db", tmp_path / "catalog.db", "--listen", "grpc://127.0.0.1:0")
    store = tmp_path / "store"
    node = start("node", "--store", store, "--catalog", catalog.uri)
    with dis.connect(node.uri) as client:
        client.put("good", GOOD)
    for name, content in DAMAGED.items():
        commit(node.uri, name, content)
    refused_by(catalog.uri)
    refused_by(node.uri)
    node.kill()
    node = start("node", "--store", store, "--catalog", catalog.uri)
    refused_by(catalog.uri)
    assert node.terminate() == 0


class Liar(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A node that sends the damage which pyarrow does not detect."""

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(pa.ipc.open_stream(DAMAGED[ticket.ticket.decode()]))


def test_a_catalog_does_not_believe_what_a_node_sends() -> None:
    names = ["list offsets that go back", "string offsets beyond the text in the middle", "views beyond their buffer"]
    with Liar("grpc://127.0.0.1:0") as liar, closing(Database()) as database:
        liars = NodeRecord("liar", "here", "boot", f"grpc://127.0.0.1:{liar.port}", ())
        database.register(liars, [], "", FOREVER, serial=-1)
        for name in names:
            schema = pa.ipc.open_stream(DAMAGED[name]).schema.serialize().to_pybytes()
            database.publish(dis.Commit(name, key=name), schema, [Part(name, "liar", name.encode(), 2, 9)])
        with closing(CatalogService("grpc://127.0.0.1:0", database=database)) as catalog:
            client = flight.FlightClient(catalog.uri)
            for name in names:
                with pytest.raises(flight.FlightServerError, match="a record batch is not valid"):
                    client.do_get(flight.Ticket(name.encode())).read_all()
            client.close()


def test_a_table_that_is_damaged_is_an_error_for_who_reads_it_over_flight() -> None:
    """The table is also read by columns, and from a callable."""
    table = pa.ipc.open_stream(DAMAGED["string offsets beyond the text in the middle"]).read_all()
    worse = pa.ipc.open_stream(DAMAGED["list offsets beyond the child"]).read_all()
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("held", table.append_column("y", pa.array([1, 2])))
        server.publish("called", lambda: worse)
        for name, columns in (("held", None), ("held", ["x"]), ("called", None)):
            with pytest.raises(dis.errors.CatalogError, match="a record batch is not valid"):
                client.read(name, transport="grpc", columns=columns).read_all()


#: Changes a few bytes of good segments again and again, and lets a node serve the result. The node must not die.
FUZZ = """
import io, os, random, sys
from pathlib import Path
import pyarrow as pa, pyarrow.flight as flight
import dissociated as dis
from dissociated.node.node import Node
from dissociated.control.commit import StagedSegment
from dissociated.store.store import Store

random.seed(int(sys.argv[2]))
N = 20
words = pa.array([f"v{n}" if n % 3 else None for n in range(N)])
children = [pa.array(range(N), pa.int64()), words]
kinds = pa.array([n % 2 for n in range(N)], pa.int8())
struct = pa.struct([("a", pa.int32()), ("b", pa.string())])
columns = {
    "words": words,
    "views": pa.array([f"a long word that is a view {n}" for n in range(N)], pa.string_view()),
    "lists": pa.array([[n] * (n % 4) if n % 5 else None for n in range(N)], pa.list_(pa.int64())),
    "deep": pa.array([[str(n)] * (n % 4) for n in range(N)], pa.large_list(pa.string())),
    "list views": pa.array([[n] * (n % 4) for n in range(N)], pa.list_view(pa.int64())),
    "fixed": pa.array([[n, n] for n in range(N)], pa.list_(pa.int16(), 2)),
    "maps": pa.array([[("k", n)] for n in range(N)], pa.map_(pa.string(), pa.int64())),
    "structs": pa.array([{"a": n, "b": str(n)} for n in range(N)], struct),
    "dictionary": words.dictionary_encode(),
    "dense": pa.UnionArray.from_dense(kinds, pa.array([n // 2 for n in range(N)], pa.int32()), children),
    "sparse": pa.UnionArray.from_sparse(kinds, children),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([5, 10, 20], pa.int32()), pa.array(["a", "b", "c"])),
}
EXTREME = [b"\\xff\\xff\\xff\\x7f", b"\\0\\0\\0\\x80", b"\\xff\\xff\\xff\\xff", b"\\x40\\0\\0\\0", b"\\0\\0\\x10\\0"]

def damaged(content):
    content = bytearray(content)
    for _ in range(random.choice([1, 1, 2, 4])):
        at = random.randrange(8, len(content) - 8) & ~3
        if random.random() < 0.3:
            content[at] = random.randrange(256)
        else:
            content[at : at + 4] = random.choice(EXTREME)
    return bytes(content)

refused = served = never = 0
with Node(Store(sys.argv[1])) as node, dis.connect(node.uri) as client, flight.FlightClient(node.uri) as plain:
    stage = Path(client.stage().directory)
    for number in range(int(sys.argv[3])):
        name = random.choice(list(columns))
        batch = pa.record_batch({name: columns[name]})
        sink = io.BytesIO()
        with random.choice([pa.ipc.new_stream, pa.ipc.new_file])(sink, batch.schema) as writer:
            writer.write_batch(batch)
            writer.write_batch(batch)
        (stage / f"{number}.arrows").write_bytes(damaged(sink.getvalue()))
        try:
            client.commit(dis.Commit("d", [StagedSegment(f"{number}.arrows")], batch.schema))
        except dis.errors.DissociatedError:
            never += 1
            continue
        for columns_wanted in (None, [name], []):
            try:
                client.read("d", transport="grpc", columns=columns_wanted).read_all()
                served += 1
            except dis.errors.DissociatedError:
                refused += 1
print(never, refused, served)
"""


@pytest.mark.usefixtures("forks")
def test_a_node_survives_whatever_it_serves(tmp_path: Path) -> None:
    seed = np.random.SeedSequence().entropy % (1 << 32)  # type: ignore[operator]
    run = run_script(FUZZ, tmp_path / "store", str(seed), str(ROWS))
    assert run.returncode == 0, f"seed {seed}: {run.returncode} {run.stderr[-2000:]}"
    assert all(int(count) for count in run.stdout.split()), run.stdout
