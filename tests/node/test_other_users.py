"""Other users of the host: they cannot pose as a user's node, nor read the files of a server."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.cli import main
from dissociated.errors import NotPrivate
from dissociated.node.launch import ensure, running
from support.helpers import PATIENCE
from support.nodes import put, spawn, table
from support.processes import Start, run_script

NOBODY = 65534
#: A prefix that runs a process with a umask of 0.
THEIR_NODE = """
import os, sys, tempfile
import dissociated as dis
import pyarrow as pa
from dissociated.node.node import Node
from dissociated.store.store import Store

def use(node):
    with dis.connect(node.uri) as client:
        client.put("theirs", pa.table({"n": [1]}).to_reader())
        return [info.name for info in client.list()]

with tempfile.TemporaryDirectory() as directory, Node(Store(directory + "/store"), ["tcp:"]) as node:
    use(node)  # so that everything is imported: the other user may not read this library
os.setuid(65534)
store, letter, folder = sys.argv[1:]
with Node(Store(store), ["tcp:"]) as node:
    use(node)
    os.symlink(letter, store + "/starting")
    os.rename(store + "/trash", store + "/trash.own")
    os.symlink(folder, store + "/trash")
    for path, _, files in os.walk(store):
        for name in ["", *files]:
            if not os.path.islink(os.path.join(path, name)):
                os.chmod(os.path.join(path, name), 0o777)
    print("reached", flush=True)
    sys.stdin.readline()
    print(use(node), flush=True)
"""


@pytest.fixture
def common(memory: Path) -> Path:
    """Return a directory where every user may create files, like /dev/shm and /tmp."""
    memory.chmod(0o1777)
    return memory


@pytest.fixture
def mine(memory: Path) -> Iterator[Path]:
    """Yield a private directory of this user."""
    directory = memory / "mine"
    directory.mkdir(mode=0o700)
    (directory / "00000000000001-0123456789ab-0000.arrows").write_text("Dear Sir")
    (directory / "letter").write_text("Dear Sir")
    (directory / "rows.csv").write_text("n\n42\n")
    yield directory
    for letter in ("00000000000001-0123456789ab-0000.arrows", "letter"):
        assert (directory / letter).read_text() == "Dear Sir"


@pytest.mark.needs("root")
@pytest.mark.usefixtures("forks")
def test_a_node_of_another_user_is_not_taken_for_ones_own(
    common: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = common / "dissociated-store-0"
    theirs = spawn(THEIR_NODE, store, mine / "letter", mine)
    refused = f"'{store}' belongs to user .*: choose another directory"
    for use in (ensure, running):
        with pytest.raises(NotPrivate, match=refused):
            use(store)
    for arguments in (["put", str(mine / "rows.csv"), "secret"], ["ls"], ["drop", "theirs"]):
        assert main([*arguments, "--store", str(store)]) != 0
        assert re.search(refused, capsys.readouterr().err)
    printed, _ = theirs.communicate("\n", timeout=PATIENCE)
    assert printed == "['theirs']\n"


@pytest.mark.needs("root")
@pytest.mark.parametrize("mode", [0o700, 0o777, 0o1777])
def test_a_directory_that_another_user_made_first_is_refused(common: Path, mine: Path, mode: int) -> None:
    store = common / "dissociated-store-0"
    store.mkdir()
    store.chmod(mode)
    (store / "starting").symlink_to(mine / "letter")
    (store / "trash").symlink_to(mine)
    for path in (store, *store.iterdir()):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(NotPrivate, match=f"'{store}' belongs to user"):
        ensure(store)
    assert sorted(path.name for path in store.iterdir()) == ["starting", "trash"]


def open_to_others(directory: Path) -> list[str]:
    """Return the entries below a directory whose own permissions let other users in."""
    return [
        f"{path.relative_to(directory)} {stat.filemode(path.lstat().st_mode)}"
        for path in directory.rglob("*")
        if path.lstat().st_mode & 0o077
    ]


@pytest.mark.usefixtures("forked_nodes")
def test_everything_that_servers_write_is_closed_to_others(memory: Path, start: Start) -> None:
    """This holds for any umask, and for parent directories that were missing."""
    files = memory / "files"
    files.mkdir(mode=0o700)
    catalog = start("catalog", "--db", files / "catalog.db", "--listen", "grpc://127.0.0.1:0", umask=0)
    start("node", "--store", files / "a" / "b" / "store", "--catalog", catalog.uri, "--spill", files / "s" / "disk",
          "--policy", "spill", "--limit", "2MiB", umask=0)  # fmt: skip
    before = os.umask(0)
    try:
        own = ensure(files / "own" / "store")
    finally:
        os.umask(before)
    try:
        for name in ("d", "e", "f"):
            put(catalog.uri, name, table(*range(1 << 17)))
        put(own.uri, "d", table(1, 2))
        with dis.connect(catalog.uri) as client:
            reader = client.read("f")
            client.drop("f")
            made = {path.name for path in files.rglob("*")}
            expected = {"catalog.db", "catalog.db-wal", "id", "node.json", "node.log", "manifest.json", "starting"}
            assert made >= {*expected, "shm.sock", "memfd.sock", "0000.arrows", "store", "disk"}
            assert open_to_others(files) == []
            assert reader.read_all().num_rows == 1 << 17
    finally:
        os.kill(own.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(own.pid, 0)


STOP = """
import os, sys
from dissociated.cli import main
import dissociated.cli.local, dissociated.monitoring.log
os.setuid(65534)
sys.exit(main(["stop", "--store", sys.argv[1]]))
"""


@pytest.mark.needs("root")
@pytest.mark.usefixtures("forks")
def test_stop_finds_no_node_if_its_id_belongs_to_another_users_process_now(common: Path) -> None:
    """As after a reboot, with a store on disk."""
    store = common / "store"
    store.mkdir(mode=0o700)
    (store / "node.json").write_text(json.dumps({"uri": "grpc+unix:///x.sock", "pid": os.getpid()}))
    for path in (store / "node.json", store):
        path.chmod(0o700)
        os.chown(path, NOBODY, NOBODY)
    ended = run_script(STOP, store)
    assert (ended.returncode, ended.stdout) == (0, f"no node with the store {store} runs on this host\n")


READ_EVERYTHING = """
import os, sys
os.setuid(65534)
for path, _, files in os.walk(sys.argv[1]):
    for name in files:
        try:
            print(path, name, len(open(os.path.join(path, name), "rb").read(100)))
        except PermissionError:
            print("refused")
"""


@pytest.mark.needs("root")
def test_another_user_reads_no_ticket_from_the_database_of_a_catalog(memory: Path, start: Start) -> None:
    """The directory of the database is readable."""
    memory.chmod(0o755)
    catalog = start("catalog", "--db", memory / "catalog.db", "--listen", "grpc://127.0.0.1:0", umask=0)
    assert catalog.uri
    assert {path.name for path in memory.iterdir()} == {"catalog.db", "catalog.db-wal"}
    found = run_script(READ_EVERYTHING, memory)
    assert found.stdout.split() == ["refused"] * 2, found.stderr
