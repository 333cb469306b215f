"""`dissociated conformance check` against a server that is not ours: it passes, or fails by the name of a rule."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from cli.shell import call

from . import double
from .double import ABORT, REGION, TAGGED, UNTAGGED, Region, Server, Wire, encode, end, metadata

BATCHES = [pa.record_batch({"n": [at, None, 7], "s": ["a", "", f"row {at}"]}) for at in range(2)]
BASE = 1 << 63  # the addresses exceed a signed number
#: Frames of `by_address`: the schema, then metadata and address list of each batch, then the end of stream.
SCHEMA, FIRST, LIST, END = 0, 1, 2, 5


def by_address(server: Server, region: Region, messages: list[double.Message]) -> list[bytes]:
    """Return the frames of a stream whose bodies lie in the region, one after the other."""
    frames, at = [], region.base
    for number, (header, body) in enumerate(messages):
        frames.append(encode(UNTAGGED, metadata(number, header)))
        if body is not None:
            pairs = [(at + offset, size) if size else (0, 0) for offset, size in double.buffers(header)[1]]
            frames.append(encode(TAGGED, server.lease(pairs, number), 1 << 56 | number))
            at += len(body)
    return [*frames, end(len(messages))]


def packed(messages: list[double.Message]) -> list[bytes]:
    """Return the frames of a stream with packed bodies."""
    frames = []
    for number, (header, body) in enumerate(messages):
        frames.append(encode(UNTAGGED, metadata(number, header)))
        if body is not None:
            frames.append(encode(TAGGED, body, number))
    return [*frames, end(len(messages))]


Change = Callable[[list[bytes]], list[bytes]]


@contextmanager
def serving(
    folder: Path, kind: type[Server] = Server, change: Change | None = None, skipped: int = 0
) -> Iterator[tuple[Server, str]]:
    """Run a server whose frames are changed, and whose memory lacks the first bytes. Yield it, and its URI."""
    messages = double.split(BATCHES)
    bodies = b"".join(body for _, body in messages if body is not None)
    region = Region(BASE, bodies[skipped:] + bytes(skipped))

    def answer(server: Server, wire: Wire) -> None:
        if server.is_packed:
            wire.send(*packed(messages))
            return
        frames = by_address(server, region, messages)
        wire.send(region.frame, descriptors=[region.descriptor])
        wire.send(*(frames if change is None else change(frames)))

    server = kind("shm", str(folder / "sock"), b"ticket", answer)
    try:
        yield server, f"{server.uri}&packed={server.PACKED}&request=1&frees=messages"
    finally:
        server.close()
        os.close(region.descriptor)


def check(uri: str) -> tuple[int, dict[str, str]]:
    """Run the command. Return its status, and the outcome of each check."""
    done = call("conformance", "check", uri, "--ticket", "ticket")
    return done.returncode, {
        name: f"{mark} {outcome}"
        for mark, _, rest in (line.partition(" ") for line in done.stdout.splitlines())
        for name, _, outcome in [rest.strip().partition(": ")]
    }


def test_a_server_that_is_not_ours_passes(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, uri):
        status, outcomes = check(uri)
    assert status == 0, outcomes
    assert outcomes["whole stream"] == "ok 3 messages; leased 8, freed 8"
    assert outcomes["frees one by one, in reverse order"] == "ok 3 messages; leased 8, freed 8"
    assert outcomes["packed bodies"] == "ok 3 messages, the same bytes"
    assert outcomes["frees by message"] == "ok 3 messages; leased 2, freed 2"
    assert outcomes["two streams on one connection"] == "ok 3 messages each; leased 16, freed 16"
    assert outcomes["Arrow data"] == "ok 2 batches, 6 rows"
    for rule in ("client-tags", "client-frames", "free-leased", "free-leased, a message twice", "free-length"):
        reason = f"ok ABORT with the code 5: the client breaks {rule.partition(',')[0]}"
        assert outcomes[f"refuses what breaks {rule}"].startswith(reason)
    assert len(outcomes) == 15
    # Addresses of four whole streams, messages of two, and one of each kind before it was freed once too often.
    assert len(server.freed) == 4 * 8 + 2 * 2 + 2


class Careless(Server):
    """It takes every address back, and does not count."""

    def free(self, address: int) -> None:
        if self.held[address]:
            super().free(address)
        else:
            self.held.clear()


class Hasty(Server):
    """It closes the connection although the client holds addresses."""

    def collect(self, wire: Wire) -> None:
        pass


class Silent(Server):
    """It does not say that a ticket is unknown."""

    def refuse(self, wire: Wire) -> None:
        pass


class Vague(Server):
    """It says so in words only."""

    def refuse(self, wire: Wire) -> None:
        wire.send(encode(ABORT, b"there is no such ticket"))


class Generous(Server):
    """It has an answer for every ticket."""

    def refuse(self, wire: Wire) -> None:
        wire.send(end(1))


def numbers(change: Callable[[list[int]], list[int]]) -> Change:
    """Return a change of the numbers in the first address list: the total, the count, then the pairs."""

    def changed(frames: list[bytes]) -> list[bytes]:
        (word, tag), payload = struct.unpack_from("<QQ", frames[LIST]), frames[LIST][16:]
        listed = change([*struct.unpack(f"<{(word & (1 << 56) - 1) // 8}Q", payload)])
        return [*frames[:LIST], encode(TAGGED, struct.pack(f"<{len(listed)}Q", *listed), tag), *frames[LIST + 1 :]]

    return changed


BROKEN: dict[str, Change] = {
    "list-total": numbers(lambda listed: [listed[0] - 1, *listed[1:]]),
    "list-count": numbers(lambda listed: [listed[0], listed[1] + 1, *listed[2:], 0, 0]),
    "list-lengths": numbers(lambda listed: [listed[0] + 8, *listed[1:-1], listed[-1] + 8]),
    "address-region": numbers(lambda listed: [*listed[:-2], BASE - 8, listed[-1]]),
    "tag-kind": lambda frames: [*frames[:LIST], encode(TAGGED, frames[LIST][16:], 2 << 56 | 1), *frames[LIST + 1 :]],
    "message-once": lambda frames: [*frames[: LIST + 1], frames[FIRST], *frames[LIST + 1 :]],
    "schema-first": lambda frames: [encode(UNTAGGED, metadata(0, frames[FIRST][21:])), *frames],
    "end-count": lambda frames: [*frames[:END], end(2)],
    "frame-kind": lambda frames: [*frames[:LIST], encode(8, b""), *frames[LIST:]],
    "region-descriptor": lambda frames: [encode(REGION, struct.pack("<QQQ", 8, 8, 1)), *frames],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_rule_is_named_that_a_server_breaks(rule: str, tmp_path: Path) -> None:
    with serving(tmp_path, change=BROKEN[rule]) as (server, uri):
        status, outcomes = check(uri)
    assert status == 1
    assert outcomes["whole stream"].startswith(f"FAIL breaks {rule}: ")
    assert outcomes["Arrow data"] == "ok not checked: the whole stream cannot be read"
    assert outcomes["unknown ticket"].startswith("ok ABORT with the code 27")
    assert not server.freed


def test_bodies_by_address_that_differ_from_packed_bodies_are_found(tmp_path: Path) -> None:
    with serving(tmp_path, skipped=8) as (_, uri):
        status, outcomes = check(uri)
    assert status == 1
    assert outcomes["packed bodies"].startswith("FAIL breaks no rule by name: the packed bodies have other bytes")


@pytest.mark.parametrize(
    ("kind", "name", "outcome"),
    [
        (Careless, "refuses what breaks free-leased", "closed the connection without ABORT"),
        (Careless, "refuses what breaks free-leased, a message twice", "closed the connection without ABORT"),
        (Hasty, "frees one by one, in reverse order", "closed the connection"),  # soon, or not before a free is sent
        (Silent, "unknown ticket", "closed the connection without ABORT; an unknown ticket has the code 27"),
        (Vague, "unknown ticket", "sent ABORT without a code; an unknown ticket has the code 27"),
        (Generous, "unknown ticket", "sent a message in place of ABORT"),
    ],
    ids=["careless", "careless-by-message", "hasty", "silent", "vague", "generous"],
)
def test_a_server_is_found_out_that_breaks_no_rule_of_a_stream(
    kind: type[Server], name: str, outcome: str, tmp_path: Path
) -> None:
    with serving(tmp_path, kind) as (_, uri):
        status, outcomes = check(uri)
    assert status == 1
    assert outcomes[name].startswith("FAIL ")
    assert outcome in outcomes[name]
