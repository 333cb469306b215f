from __future__ import annotations

from contextlib import closing

import pyarrow as pa
import pytest

from dissociated.errors import TransportError, UriError
from dissociated.protocol.message import Message
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE

INPROC = transport("inproc")


def test_a_buffer_is_handed_over_by_reference() -> None:
    body = pa.py_buffer(b"body")
    with closing(INPROC.listen(Uri.parse("inproc:"))) as listener:
        client = INPROC.connect(listener.uri, PATIENCE)
        server = listener.accept()
        assert server is not None
        server.send([Message(1, (body,))], PATIENCE)
        arrived = client.receive(PATIENCE, lambda tag, length: bytearray(length))
        assert arrived is not None
        assert arrived[1] is body


def test_names_are_taken_once_and_free_again_after_closing() -> None:
    with closing(INPROC.listen(Uri.parse("inproc://name"))) as listener:
        assert INPROC.reachable(listener.uri)
        with pytest.raises(TransportError, match="another server listens at inproc://name already"):
            INPROC.listen(Uri.parse("inproc://name"))
    assert not INPROC.reachable(listener.uri)
    with pytest.raises(TransportError, match="no server listens at inproc://name in this process"):
        INPROC.connect(listener.uri, PATIENCE)
    INPROC.listen(Uri.parse("inproc://name")).close()


def test_a_path_is_refused() -> None:
    with pytest.raises(UriError, match="inproc needs a name alone"):
        INPROC.listen(Uri.parse("inproc://name/path"))
