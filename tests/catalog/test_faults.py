"""Failing writes of a catalog's database: the next catalog knows exactly the acknowledged commits."""

from __future__ import annotations

import errno
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from store.steps import STEPS, State, node, served, take_all
from support.helpers import PATIENCE, case
from support.injection import SQLiteFault, calls, child_environment
from support.processes import Fork

FOR_GOOD = 1 << 30  # calls: until the process ends

pytestmark = pytest.mark.needs("SQLite's calls")


def restarted(directory: Path) -> State:
    with (
        node(directory / "store", str(directory / "db"), staging_timeout=-1.0) as again,
        dis.connect(again.uri) as client,
    ):
        found = served(client)
        assert {version.name for version in again.store.versions()} == {*found}
    return found


@pytest.mark.parametrize(
    ("error", "times", "stride"), [(errno.EIO, 1, 13), (errno.ENOSPC, FOR_GOOD, 25)], ids=["once", "for good"]
)
def test_a_write_that_fails_is_told_and_changes_nothing(memory: Path, error: int, times: int, stride: int) -> None:
    for at in calls(stride):
        directory = memory / str(at)
        directory.mkdir()
        with node(directory / "store", str(directory / "db")) as first, dis.connect(first.uri) as client:
            with SQLiteFault(at, error, times) as fault, case(f"write {at}"):
                state = take_all(client, fault)
            with case(f"write {at}"):
                assert served(client) == state
        with case(f"write {at}, after a restart"):
            assert restarted(directory) == state
        if not fault.came:
            assert at > 10
            return


CHILD = """
import sys
from dissociated.catalog.database import Database
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import Commit
from dissociated.control.version import NodeRecord, Part
from store.steps import SCHEMA, STEPS
from support.injection import SQLiteFault
database = Database(sys.argv[1])
database.register(NodeRecord("node", "host", "boot", "grpc://host:1", ()), [], "", FOREVER)
print("began", flush=True)
with SQLiteFault(int(sys.argv[2]), None):
    for number, (name, mode, _) in enumerate(STEPS):
        if mode == "drop":
            database.drop(name)
        else:
            part = Part(str(number), "node", f"ticket {number}".encode(), 1, 1)
            commit = Commit(name, key=f"key {number}", mode=mode)
            database.publish(commit, SCHEMA.serialize().to_pybytes(), [part])
        print(number, flush=True)
"""


def test_a_catalog_killed_at_any_write_has_done_what_it_said_and_at_most_one_step_more(
    tmp_path: Path, forks: None
) -> None:
    states: list[dict[str, int]] = [{}]  # number of parts by dataset name
    for name, mode, _ in STEPS:
        others = {other: count for other, count in states[-1].items() if other != name}
        states.append(others if mode == "drop" else {**others, name: 1 + (mode == "append") * states[-1].get(name, 0)})
    for at in calls(10):  # a page takes two writes
        path = tmp_path / str(at)
        with Fork("-c", CHILD, path, str(at), stdout=subprocess.PIPE, env=child_environment()) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        if process.returncode == 0:
            assert at > 10
            return
        assert process.returncode == -signal.SIGKILL
        done = len(said.split()) - 1
        database = Database(str(path))
        with case(f"write {at}, in {STEPS[done]}"), closing(database):
            found = {record.name: len(record.parts) for record in database.datasets()}
            assert found in states[done : done + 2]
