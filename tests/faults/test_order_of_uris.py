"""Two URIs in the wrong order: the client reports this at once, from the URIs or from the arriving data."""

from __future__ import annotations

import pytest

import dissociated as dis
from dissociated.errors import RemoteProtocolError, UriError

from .conftest import Scripted, Serve
from .content import BODY, META, SCHEMA, TABLE
from .peer import PATIENCE, PREAMBLE, RawConnection, Script, body, end


def saying(data: bytes) -> Script:
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE + data)
        connection.hold()

    return script


def test_uris_that_tell_are_refused_before_anybody_connects(serve: Serve) -> None:
    good = serve("tcp://127.0.0.1:0")
    metadata, bodies = (good.server.locations("good", streams=one)[0] for one in ("metadata", "bodies"))
    with pytest.raises(UriError, match="swap them"):
        dis.open_stream([bodies, metadata], good.server.ticket("good"))
    dis.open_stream([metadata, bodies], good.server.ticket("good")).read_all()


def test_other_uris_are_found_out_by_what_arrives(scripted: Scripted) -> None:
    """Read at URIs that do not show the order, such as those of the C++ reference. No deadline ends the read."""
    said = "of two URIs the first is that of the metadata"
    for metadata, bodies in ((SCHEMA + META + end(2), body(1, BODY)), (SCHEMA + end(1), b"")):
        first, second = scripted("tcp", saying(metadata)), scripted("tcp", saying(bodies))
        with pytest.raises(RemoteProtocolError, match=said):
            dis.open_stream([second.uri, first.uri], b"ticket", timeout=100 * PATIENCE).read_all()
        first.wait_done()
        second.wait_done()
        right = dis.open_stream([first.uri, second.uri], b"ticket", timeout=PATIENCE).read_all()
        assert right.equals(TABLE if bodies else TABLE.slice(0, 0))
