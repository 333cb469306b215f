"""A catalog that names a directory of its own choice as the stage: clients write nothing there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.base.host import boot_id
from dissociated.errors import CatalogError, StoreError
from dissociated.node.node import Node
from dissociated.store.stage import StagePlace
from dissociated.store.store import Store
from support.helpers import case

NOBODY = 65534
#: A name that a store gives to a segment in its trash.
REMOVED = "00000000000001-0123456789ab-0000.arrows"
LETTER = "Dear Sir" * (1 << 14)
TABLE = pa.table({"n": pa.array(range(1 << 15), pa.int64())})


class LyingCatalog(flight.FlightServerBase):  # type: ignore[misc]
    """A catalog that names `directory` as its stage."""

    def __init__(self, directory: Path, node: str) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.uri = f"grpc://127.0.0.1:{self.port}"
        status = os.stat(directory)
        inode = f"{status.st_dev}:{status.st_ino}"
        place = StagePlace(str(directory), "here", boot_id(), node, self.uri, limited=True, inode=inode)
        self._answers: dict[str, Any] = {"stage": asdict(place), "committed": {"committed": False}}

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> Iterator[flight.Result]:
        asked = json.loads(action.body.to_pybytes())
        answer = {"size": asked["wish"]} if action.type == "reserve" else self._answers.get(action.type, {})
        yield flight.Result(json.dumps(answer).encode())


@pytest.fixture
def folder(memory: Path) -> Path:
    """Create a private folder of a user that has the layout of a store."""
    folder = memory / "folder"
    for name in ("", "staging", "trash"):
        (folder / name).mkdir(mode=0o700)
    (folder / "trash" / REMOVED).write_text(LETTER)
    return folder


def check_nothing_is_written(directory: Path, node: str, letter: Path) -> None:
    before = sorted(directory.iterdir())
    with LyingCatalog(directory, node) as catalog, dis.connect(catalog.uri) as client:
        with pytest.raises(CatalogError, match="no node on this host whose memory this process could write to"):
            client.put("d", TABLE.to_reader(), transport="shm")
        assert not client.stage().here
        with pytest.raises(StoreError), client.stage().open():
            pass
    assert sorted(directory.iterdir()) == before
    assert letter.read_text() == LETTER


def test_a_client_writes_into_no_folder_of_its_user_that_is_no_store(folder: Path) -> None:
    check_nothing_is_written(folder / "staging", "", folder / "trash" / REMOVED)
    (folder / "id").write_text("0123456789abcdef")  # the ID of another store than the node's
    check_nothing_is_written(folder / "staging", "0123456789abcdee", folder / "trash" / REMOVED)


@pytest.mark.needs("root")
def test_a_client_writes_into_no_directory_of_another_user(folder: Path, memory: Path) -> None:
    theirs = memory / "theirs"
    for directory in (theirs, theirs / "staging"):
        directory.mkdir()
        directory.chmod(0o777)
    (theirs / "trash").symlink_to(folder / "trash")
    (theirs / "id").write_text("0123456789abcdef")
    for path in (theirs, *theirs.iterdir()):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    check_nothing_is_written(theirs / "staging", "0123456789abcdef", folder / "trash" / REMOVED)
    for path in (theirs, theirs / "staging"):
        path.chmod(0o700)
    check_nothing_is_written(theirs / "staging", "0123456789abcdef", folder / "trash" / REMOVED)


def test_a_client_follows_no_link_to_a_stage(folder: Path, memory: Path) -> None:
    (folder / "id").write_text("0123456789abcdef")
    link, other = memory / "link", memory / "other"
    link.symlink_to(folder)
    other.mkdir(mode=0o700)
    (other / "id").write_text("0123456789abcdef")
    (other / "staging").symlink_to(folder / "staging")
    for path in (link / "staging", other / "staging"):
        with case(path):
            check_nothing_is_written(path, "0123456789abcdef", folder / "trash" / REMOVED)


def test_what_replaces_a_stage_while_it_is_open_is_not_written_to(memory: Path) -> None:
    with Node(Store(memory / "store"), []) as node, dis.connect(node.uri) as client:
        place = client.stage()
        with place.open() as path:
            os.rename(memory / "store", memory / "moved")
            (memory / "store" / "staging").mkdir(parents=True)
            (path / "w").write_text("x")
            assert (memory / "moved" / "staging" / "w").exists()
        assert not (memory / "store" / "staging" / "w").exists()
        assert not place.here


@pytest.mark.parametrize("limited", [True, False])
def test_a_put_writes_into_the_stage_of_a_node_of_its_user(memory: Path, limited: bool) -> None:
    with (
        Node(Store(memory / "store"), []) if limited else dis.Server(["inproc:"]) as server,
        dis.connect(server.uri if isinstance(server, Node) else server.catalog_uri) as client,
    ):
        assert client.stage().here
        assert client.stage().limited is limited
        for _ in range(2):
            client.put("d", TABLE.to_reader(), transport="shm")
        assert client.read("d", transport="grpc").read_all() == TABLE
