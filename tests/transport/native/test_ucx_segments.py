"""TCP segments of UCX: UCX writes a segment beyond the peer's receive buffer if it is larger than that."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DissociatedError, UriError
from dissociated.transport.native.ucx import worker
from dissociated.uri import Uri
from support.helpers import Child

pytestmark = pytest.mark.needs("ucx")

#: Bodies in many pieces, as tables of many columns have, which UCX copies into segments.
COLUMNS, ROWS, BATCHES = 40, 10_000, 6

#: A UCX client that is not ours: it reads all bodies of a stream, and prints their digest.
FOREIGN = """
    import hashlib, sys
    from support import ucx_peer

    uri, ticket, bodies = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
    place, _, query = uri.removeprefix("ucx://").partition("?")
    want = int(dict(one.split("=") for one in query.split("&"))["want_data"])
    worker = ucx_peer.Worker(ucx_peer.Context())
    worker.connect(int(place.rpartition(":")[2]), 1)
    worker.send_tagged(want, [ticket])
    seen = hashlib.sha256()
    for number in range(1, bodies + 1):
        seen.update(worker.receive(number, 2**64 - 1)[1])
    worker.until(lambda: any(one[0] == 0 for one in worker.messages))
    print(seen.hexdigest())
    """

#: A client of this library.
OURS = """
    import sys
    import dissociated as dis

    table = dis.open_stream(sys.argv[1], bytes.fromhex(sys.argv[2])).read_all()
    table.validate(full=True)
    assert all(table[name].to_pylist() == [int(name) + n for n in range(len(table))] for name in table.column_names[:2])
    print(len(table))
    """


@pytest.fixture(scope="module")
def table() -> pa.Table:
    whole = pa.table({str(n): np.arange(n, n + ROWS * BATCHES) for n in range(COLUMNS)})
    return pa.Table.from_batches(whole.to_batches(max_chunksize=ROWS))


@pytest.fixture(scope="module")
def server(table: pa.Table) -> Iterator[dis.Server]:
    with dis.Server(["ucx:"], catalog=None) as server:
        server.publish("wide", table)
        yield server


def foreign_environment(**environment: str) -> dict[str, str]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    defaults = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "8k"}
    return {**os.environ, "PYTHONPATH": paths, **defaults, **environment}


def run(script: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        env=foreign_environment(**environment),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()


def digest(table: pa.Table) -> str:
    """Return the digest of all bodies, which consist of adjacent buffers with lengths in multiples of 8 bytes."""
    seen = hashlib.sha256()
    for batch in table.to_batches():
        for column in batch.columns:
            values = column.buffers()[1]
            assert values is not None
            seen.update(values.slice(column.offset * 8, len(column) * 8))
    return seen.hexdigest()


def test_peers_that_receive_smaller_segments_than_ours_are_sent_none_that_are_larger(
    server: dis.Server, table: pa.Table
) -> None:
    """Read with smaller receive segments. If all sides used 256 kB, the first two clients crashed or waited forever."""
    (uri,), ticket = server.locations("wide"), server.ticket("wide").hex()
    assert run(FOREIGN, uri, ticket, str(BATCHES)) == digest(table)
    assert run(FOREIGN, uri, ticket, str(BATCHES), UCX_TCP_RX_SEG_SIZE="8k") == digest(table)
    small = {"UCX_TCP_RX_SEG_SIZE": "8k", "UCX_TCP_TX_SEG_SIZE": "8k"}
    assert run(OURS, uri, ticket, **small) == str(len(table))


#: A UCX server that receives in segments of 8 kB. It prints its port, and then the client's id and request.
FOREIGN_SERVER = """
    import sys
    from support import ucx_binding as c
    from support import ucx_peer

    context = ucx_peer.Context()
    listening, worker = ucx_peer.Worker(context), ucx_peer.Worker(context)
    print(listening.listen(), flush=True)
    listening.until(lambda: listening.requests, 60)
    asked = worker.ffi.new("ucp_conn_request_attr_t *")
    asked.field_mask = c.CONN_REQUEST_CLIENT_ID
    assert worker.lib.ucp_conn_request_query(listening.requests[0], asked) == c.OK
    worker.accept(listening.requests[0], None)
    tag, content = worker.receive()
    print(f"{asked.client_id:x}", tag, len(content), len(set(content)), flush=True)
    """


def test_a_client_sends_no_larger_segments_than_its_server_has_said() -> None:
    with Child(
        [sys.executable, "-c", textwrap.dedent(FOREIGN_SERVER)],
        env=foreign_environment(UCX_TCP_RX_SEG_SIZE="8k"),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with pytest.raises(DissociatedError):  # The server exits without an answer.
                dis.open_stream(f"ucx://127.0.0.1:{port}?want_data=7", b"t" * 60_000, timeout=20)
            # "DISSOC", segments of 2^18 bytes, and the version of our own extension.
            assert process.stdout.readline().split() == ["444953534f431201", "7", "60000", "1"]
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_ours_say_that_they_receive_large_segments_and_then_send_them(
    server: dis.Server, table: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = []
    context = worker.context

    def recording(where: worker.ContextKey) -> worker.Context:
        large.append(where.large)
        return context(where)

    monkeypatch.setattr(worker, "context", recording)
    (uri,) = server.locations("wide")
    offered = Uri.parse(uri).parameters["tcp_segment"]
    assert offered == "262144"
    assert dis.open_stream(uri, server.ticket("wide")).read_all().equals(table)
    assert large == [True, True], "the client's, and the server's"
    del large[:]
    silent = uri.replace(f"&tcp_segment={offered}", "")
    assert dis.open_stream(silent, server.ticket("wide")).read_all().equals(table)
    assert large == [False, True], "what the server may send is the client's to say"
    with pytest.raises(UriError, match="tcp_segment=much"):
        dis.open_stream(uri.replace(offered, "much"), server.ticket("wide"))
