"""Servers that send invalid tensors, and a server that waits for memory to be freed."""

from __future__ import annotations

import fcntl
import os
import struct

import pytest

import dissociated as dis
from dissociated.errors import RemoteProtocolError
from support.tensor_cases import GOLDEN, expected

from .conftest import Scripted
from .content import META, SCHEMA
from .peer import (
    ADDRESSES,
    FREE,
    PATIENCE,
    PREAMBLE,
    SEALED,
    RawConnection,
    RawServer,
    Script,
    addresses,
    body,
    end,
    metadata,
    region,
)

ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
BASE = 1 << 20


def message(name: str) -> tuple[bytes, bytes]:
    """Return the flatbuffer and the body of a golden tensor."""
    content = GOLDEN[name]
    body_at = 8 + int.from_bytes(content[4:8], "little")
    return content[8:body_at], content[body_at:]


CSR, CSR_BODY = message("csr_int64")  # buffers of 40, 40 and 40 bytes
DENSE, DENSE_BODY = message("dense")  # 192 bytes


def saying(data: bytes, share: bytes | None = None) -> Script:
    """Return a script that answers the request with a region of the content `share`, if any, and with `data`."""

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        if share is not None:
            send_region(connection, share)
        connection.send(data)
        connection.hold()

    return script


def send_region(connection: RawConnection, content: bytes) -> None:
    descriptor = os.memfd_create("raw", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(descriptor, content, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, ALL_SEALS)
        connection.send_with(region(BASE, len(content), SEALED), [descriptor])
    finally:
        os.close(descriptor)


def patched(content: bytes, at: int, value: int) -> bytes:
    return content[:at] + struct.pack("<q", value) + content[at + 8 :]


def refused(server: RawServer, phrase: str) -> None:
    with pytest.raises(RemoteProtocolError, match=phrase) as caught:
        list(dis.open_tensors(server.uri, b"ticket", timeout=PATIENCE))
    del caught  # The traceback refers to mapped buffers, which keep the connection open.
    server.wait_done()


LENGTH_AT = CSR.index(struct.pack("<qq", 80, 40)) + 8  # offset of the buffer of values


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("data", "phrase"),
    [
        (
            metadata(0, CSR) + body(0, patched(CSR_BODY, 40, 6)),
            "cannot be read: the sparse tensor has an index outside",
        ),
        (metadata(0, CSR) + body(0, patched(CSR_BODY, 8, -1)), "cannot be read: .* are not in order"),
        (metadata(0, patched(CSR, LENGTH_AT, 48)) + body(0, CSR_BODY), "extends beyond its body of 120 bytes"),
        (metadata(0, patched(CSR, LENGTH_AT, 32)) + body(0, CSR_BODY), "32 bytes; at least 40 are required"),
        (metadata(0, CSR[:60]), "not an Arrow IPC message|sparse tensor that cannot be read"),
        (metadata(0, CSR) + body(0, CSR_BODY[:-8]), "its metadata announced 120"),
        (metadata(0, DENSE) + body(0, DENSE_BODY) + META, "either tensors only, or none"),
        (metadata(1, DENSE) + SCHEMA, "either tensors only, or none"),
        (metadata(0, CSR) + body(0, addresses((BASE, 40), (BASE, 40)), ADDRESSES), "announced 3"),
        (metadata(0, CSR) + body(0, addresses(*[(BASE, 40)] * 3), ADDRESSES), "in no region that it shared"),
    ],
    ids=range(10),
)
def test_an_invalid_tensor_is_refused(scripted: Scripted, scheme: str, data: bytes, phrase: str) -> None:
    refused(scripted(scheme, saying(data)), phrase)


@pytest.mark.parametrize(
    ("extents", "phrase"),
    [
        (((BASE, 40), (BASE + 40, 40), (BASE + 88, 40)), "extends beyond <Region"),
        (((BASE - 8, 40), (BASE + 40, 40), (BASE + 80, 40)), "in no region that it shared"),
        (((BASE + 40, 40), (BASE + 40, 40), (BASE + 80, 40)), "are not in order"),
    ],
    ids=["leaves its end", "begins before it", "are invalid"],
)
def test_buffers_that_lie_elsewhere_are_refused(scripted: Scripted, extents: tuple, phrase: str) -> None:
    data = metadata(0, CSR) + body(0, addresses(*extents), ADDRESSES)
    refused(scripted("shm", saying(data, CSR_BODY)), phrase)


def test_a_reader_that_has_failed_fails_again(scripted: Scripted) -> None:
    """Raise the error again on the next read: a failed reader must not look like one that has ended."""
    server = scripted("tcp", saying(metadata(0, DENSE) + body(0, DENSE_BODY) + META))
    reader = dis.open_tensors(server.uri, b"ticket", timeout=PATIENCE)
    next(reader)
    for _ in range(3):
        with pytest.raises(RemoteProtocolError, match="either tensors only, or none"):
            next(reader)
    server.wait_done()


def test_buffers_may_lie_anywhere(scripted: Scripted) -> None:
    """Accept buffers in any order and without alignment."""
    share = b"?" + CSR_BODY[80:] + b"!" + CSR_BODY[:40] + b"?!" + CSR_BODY[40:80]
    extents = (BASE + 42, 40), (BASE + 84, 40), (BASE + 1, 40)
    data = metadata(0, CSR) + body(0, addresses(*extents), ADDRESSES) + end(1)
    server = scripted("shm", saying(data, share))
    (tensor,) = dis.open_tensors(server.uri, b"ticket", timeout=PATIENCE)
    assert (tensor.to_tensor().to_numpy() == expected("csr_int64")[0]).all()
    del tensor
    server.wait_done()


def test_memory_goes_back_while_more_is_read(scripted: Scripted) -> None:
    """Free the first tensor while the reader waits for the second, which the server sends only afterwards."""

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        send_region(connection, DENSE_BODY)
        for number in range(2):
            listed = addresses((BASE, 192))
            connection.send(metadata(number, DENSE) + body(number, listed, ADDRESSES))
            returned = connection.read_frame()
            assert (returned.tag, returned.payload) == (FREE, struct.pack("<Q", BASE))
        connection.send(end(2))
        connection.hold()

    server = scripted("shm", script)
    reader = dis.open_tensors(server.uri, b"ticket", timeout=PATIENCE)
    for _ in range(2):
        kept = next(reader).to_numpy()
        assert (kept == expected("dense")[0]).all()
        del kept
    assert list(reader) == []
    del reader
    server.wait_done()
