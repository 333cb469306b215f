"""Memory that a reader over shared memory holds: it never changes, whatever happens to dataset, store and server.

The checksums are computed from the data that was put.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support.helpers import case, clients_end, connections_left, wait_until
from support.nodes import MIB, put

ROUNDS = 2


def numbers(seed: int, size: int = 2 * MIB) -> pa.Table:
    values = np.random.default_rng(seed).integers(1, 1 << 60, size // 8)
    return pa.Table.from_batches(pa.table({"n": values}).to_batches(max_chunksize=size // 32))


def checksum(table: pa.Table) -> int:
    total = 0
    for chunk in table["n"].chunks:
        total = zlib.crc32(chunk.to_numpy(), total)
    return total


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_eviction_and_spilling_and_the_use_of_pages_again(memory: Path, tmp_path: Path, policy: Policy) -> None:
    """Tables are put into a store with room for two or three, and read.

    Some readers keep the memory, others release it.
    """
    spill = tmp_path if policy is Policy.SPILL else None
    held: list[tuple[int, pa.Table]] = []
    gone: set[str] = set()  # evicted, not dropped
    dropped: set[str] = set()
    with Node(Store(memory, limit=14 * MIB, policy=policy, spill=spill), ["shm:"], retain=0.0) as node:
        for number in range(6 * ROUNDS):
            table = numbers(number)
            with case(f"dataset {number}"), dis.connect(node.uri) as client:
                name = f"d{number % 9}"
                # An evicted dataset cannot be appended to.
                mode = "append" if not number % 4 and name in client else "overwrite"
                put(node.uri, name, table, mode=mode)
                read = client.read(name, transport="shm").read_all()
                kept = read.slice(read.num_rows - table.num_rows)  # the appended rows
                assert checksum(kept) == checksum(table)
                if number % 2:
                    held = [*held[-1:], (checksum(table), kept)]
                del read, kept
                if number % 5 == 4:
                    client.drop(name)
                    dropped.add(name)
                assert [checksum(one) for _, one in held] == [total for total, _ in held]
                gone |= {f"d{one % 9}" for one in range(number)} - {info.name for info in client.list()} - dropped
        assert gone or node.store.usage().spilled, "nothing had to make room: this test would see nothing"
    assert [checksum(one) for _, one in held] == [total for total, _ in held]


def test_deadlines_drops_replacements_and_the_end_of_the_server() -> None:
    """The datasets have no store, and the server disconnects a reader that holds memory for too long."""

    def as_table(server: dis.Server, table: pa.Table) -> None:
        server.publish("d", table)

    def written(server: dis.Server, table: pa.Table) -> None:
        with server.writer("d", table.schema) as writer:
            writer.write(table)

    def as_tensor(server: dis.Server, table: pa.Table) -> None:
        server.publish("d", pa.Tensor.from_numpy(table["n"].combine_chunks().to_numpy()))

    def own(server: dis.Server, table: pa.Table) -> None:
        server.publish("d", table.to_reader)

    def shared(server: dis.Server, table: pa.Table) -> None:
        server.publish("d", table.to_reader(), live=dis.Live())

    def held_by_a_reader(server: dis.Server) -> Callable[[], int]:
        uri, ticket = server.locations("d")[0], server.ticket("d")
        if publish is as_tensor:
            (tensor,) = dis.open_tensors(uri, ticket)
            return lambda: zlib.crc32(np.ascontiguousarray(tensor.to_numpy()).data)
        read = dis.open_stream(uri, ticket).read_all()
        return lambda: checksum(read)

    ends: dict[str, Callable[[dis.Server], Any]] = {
        "held for too long": lambda server: None,
        "dropped": lambda server: server.drop("d"),
        "replaced": lambda server: as_table(server, numbers(99)),
        "the server ends": lambda server: server.close(),
    }
    others = {*threading.enumerate()}
    for publish in (as_table, written, as_tensor, own, shared):
        for what, end in ends.items():
            with case(f"{publish.__name__}, {what}"), dis.Server(["shm:"], catalog=None, lease_timeout=0.05) as server:
                table = numbers(7, MIB)
                publish(server, table)
                look = held_by_a_reader(server)
                end(server)
                wait_until(partial(_sent_away, server), "the server has given up on it")
                assert look() == checksum(table)
                for other in range(3):
                    if end is not ends["the server ends"]:
                        server.publish("other", numbers(other, MIB))
                        dis.open_stream(server.locations("other")[0], server.ticket("other")).read_all()
                server.close()
                assert look() == checksum(table)
                del look
                clients_end(but=others)
                assert connections_left(server) == 0


def _sent_away(server: dis.Server) -> bool:
    return all(one.state == "cut off" for one in server.status().consumers)
