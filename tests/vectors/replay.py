"""Replay of test vectors, as docs/vectors.md describes it."""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from faults.peer import FILE, LIVE, SEALED, TAGGED, RawConnection, RawServer

HERE = Path(__file__).parent
INDEX = json.loads((HERE / "index.json").read_text())
NAMES: list[str] = INDEX["vectors"]
NUMBERS: list[dict[str, Any]] = json.loads((HERE / "numbers.json").read_text())
INVALID = [name for name in NAMES if name.startswith("invalid-")]
OF_CLIENTS = [name for name in INVALID if name.startswith("invalid-client-")]
ABORTED = [name for name in NAMES if name.startswith("abort-")]
TENSORS = [name for name in NAMES if name.startswith("tensor-")]
REQUESTS = [name for name in NAMES if name.startswith("request-")]
READABLE = [name for name in NAMES if name not in {*INVALID, *ABORTED, *TENSORS, *REQUESTS}]
SEALS = {
    FILE: 0,
    SEALED: fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
    LIVE: fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
}


class Vector:
    """A vector as docs/vectors.md describes its files."""

    def __init__(self, name: str) -> None:
        self.folder = HERE / name
        self.plain: dict[str, Any] = json.loads((self.folder / "vector.json").read_text())
        self.ticket = self.plain["ticket"].encode()

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    @property
    def schemes(self) -> list[str]:
        return ["shm"] if self.plain["medium"] == "shm" else ["shm", "tcp"]

    def descriptor(self, region: dict[str, Any], scratch: Path) -> int:
        kind = region.get("made_as", region["backing"])
        if kind == FILE:
            path = scratch / region["file"]
            path.write_bytes(self.read(region["file"]))
            return os.open(path, os.O_RDONLY)
        descriptor = os.memfd_create("vector", os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, int(region["size"]))
        os.pwrite(descriptor, self.read(region["file"]), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS[kind])
        return descriptor

    def send(self, connection: RawConnection, scratch: Path) -> None:
        data, at = self.read("server"), 0
        for region in self.plain.get("regions", ()):
            connection.send(data[at : region["at"]])
            end = region["at"] + 16 + 24
            descriptor = self.descriptor(region, scratch)
            connection.send_with(data[region["at"] : end], [descriptor])
            os.close(descriptor)
            at = end
        connection.send(data[at:])


@contextmanager
def replayed(vector: Vector, scheme: str, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a vector once. Yield its URI, and the list that gets the freed addresses."""
    freed: list[str] = []

    def script(connection: RawConnection) -> None:
        connection.expect(vector.read("client"))
        vector.send(connection, scratch)
        if vector.plain.get("broken_rule") == "stream-whole":
            return
        with suppress(EOFError, ConnectionResetError):
            while True:
                frame = connection.read_frame()
                if frame.kind == TAGGED and str(frame.tag) == vector.plain.get("free_data"):
                    freed.extend(map(str, struct.unpack(f"<{len(frame.payload) // 8}Q", frame.payload)))
                if len(freed) == len(vector.plain.get("frees", ())):
                    return

    with RawServer(scheme, str(scratch / "sock"), script) as server:
        tags = "".join(f"{name}={vector.plain[name]}&" for name in ("want_data", "free_data") if name in vector.plain)
        tags += "request=1&frees=messages" if "frees" in vector.plain.get("request", ()) else ""
        yield f"{server.uri.partition('?')[0]}?{tags.rstrip('&')}", freed
        server.wait_done()


def cases(names: list[str]) -> list[Any]:
    return [pytest.param(name, scheme, id=f"{name}-{scheme}") for name in names for scheme in Vector(name).schemes]
