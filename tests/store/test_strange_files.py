"""Files in a stage that are not segments, and peers that connect to the handover socket and send nothing."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DissociatedError, StoreError
from dissociated.memory.shared import Backing, seal
from dissociated.node.node import Node
from dissociated.store.stage import Stage
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, commit_of
from support.nodes import SCHEMA, put, read, table


def strange(directory: Path, outside: Path) -> dict[str, str]:
    """Create files that are not segments, and return the expected error for each name."""
    outside.write_bytes(b"secret")
    os.mkfifo(directory / "fifo")
    (directory / "link").symlink_to(outside)
    (directory / "dangling").symlink_to(outside / "nowhere")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(directory / "socket"))
    return {
        "fifo": "not a regular file",
        "link": "symbolic link",
        "dangling": "symbolic link",
        "socket": "not a regular file",
    }


def in_time(what: object) -> None:
    """Run `what` in a thread of its own, because the code under test might not end."""
    thread = Thread(target=what, daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for what may never come"


def test_a_file_that_is_not_regular_is_refused_and_blocks_nothing(memory: Path, tmp_path: Path) -> None:
    with Node(Store(memory / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        put(node.uri, "d", table(1))
        staging = memory / "store" / "staging"

        def run() -> None:
            for name, why in strange(staging, tmp_path / "outside").items():
                for part in ("", ".part"):
                    with case(name + part):
                        if part:
                            os.rename(staging / name, staging / (name + part))
                        with pytest.raises(DissociatedError, match=why):
                            client.commit(commit_of("d", [name + part], SCHEMA))
                        with pytest.raises(DissociatedError, match=why):
                            client.reserve(name + part, 1, 1)
            node.store.sweep()  # the files look like parts without a writer
            assert list(staging.iterdir()) == []
            failed.clear()

        failed = [True]
        in_time(run)
        assert not failed
        assert (tmp_path / "outside").read_bytes() == b"secret"
        assert read(node.uri, "d") == [1]


def test_a_stage_without_a_store_takes_regular_files_alone(memory: Path, tmp_path: Path) -> None:
    stage = Stage(memory)

    def run() -> None:
        for name, why in strange(stage.directory, tmp_path / "outside").items():
            with case(name), pytest.raises(StoreError, match=why):
                stage.take([name])
        failed.clear()

    failed = [True]
    in_time(run)
    assert not failed
    stage.close()


def test_silent_writers_delay_no_hand_over(memory: Path) -> None:
    with Node(Store(memory / "store"), ["shm:"]) as node, dis.connect(node.uri) as client, ExitStack() as silent:
        for _ in range(100):
            one = silent.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            one.settimeout(PATIENCE)
            one.connect(client.stage().handover)
        descriptor = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        silent.callback(os.close, descriptor)
        with os.fdopen(os.dup(descriptor), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            writer.write_table(table(3))
        seal(descriptor, Backing.SEALED)
        began = time.monotonic()
        client.commit(commit_of("d", [client.hand_over(descriptor)], SCHEMA))
        assert time.monotonic() - began < 4.0  # less than the timeout for the first silent peer
        assert read(node.uri, "d") == [3]
