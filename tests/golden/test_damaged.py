"""Files of Arrow's fuzzers, and mutations of golden files: each read ends in a documented exception or a usable table.

DISSOCIATED_FUZZ gives the number of mutations and the seed, like in tests/faults/test_fuzz.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from faults.outcomes import changed
from support.certificates import Certificates
from support.machine import ARROW_TEST_DATA, media
from support.processes import Fork

from .damaged import DEADLINE, MORE_MEMORY
from .ways import WAYS, medium, slow

FOLDERS = [ARROW_TEST_DATA / "arrow-ipc-stream", ARROW_TEST_DATA / "arrow-ipc-file"] if ARROW_TEST_DATA else []
DAMAGED = sorted(path for folder in FOLDERS for path in folder.iterdir() if path.is_file())

COUNT, SEED = map(int, (os.environ.get("DISSOCIATED_FUZZ", "200,1") + ",1").split(",")[:2])
LARGE = 10_000  # bytes; mutations of larger golden files would mostly hit values
PATIENCE = 9 * DEADLINE + COUNT / 5  # seconds

#: The way "libarrow" runs none of our code.
OURS = [way for way in WAYS if way != "libarrow"]
SLOW = 40  # ways that take long read only every 40th file
#: Kinds of ways that share the files: most of the damage is rejected before it reaches a medium.
SHARED = ("published", "live", "apart", "careless")
IN_PLACE = ("published-shm-any", "careless-shm-any")  # read all files, in place


def process_of(way: str) -> str:
    """Return the name of the process that runs a way. Starting one takes longer than reading a hundred files."""
    return way if way in MORE_MEMORY else medium(way) if slow(way) else "quick"


GROUPS = {name: [way for way in OURS if process_of(way) == name] for name in dict.fromkeys(map(process_of, OURS))}

pytestmark = [pytest.mark.needs("golden files"), pytest.mark.usefixtures("trusted", "forks")]


@pytest.fixture(scope="module")
def mutations(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return golden files with some bytes changed."""
    folder, dice = tmp_path_factory.mktemp("mutations"), random.Random(SEED)
    golden = sorted(path for path in FOLDERS[0].rglob("integration/**/*") if path.suffix in (".stream", ".arrow_file"))
    small = [path for path in golden if path.stat().st_size < LARGE]
    made = []
    for number in range(COUNT):
        path = dice.choice(small)
        made.append(folder / f"{number}-{path.name}")
        made[-1].write_bytes(changed(path.read_bytes(), dice))
    return made


class Ends(NamedTuple):
    """Number of results of each kind, for each way."""

    found: dict[str, Counter[str]]
    mutated: dict[str, Counter[str]]


@pytest.fixture(scope="module", params=media(GROUPS))
def ends(request: pytest.FixtureRequest, mutations: list[Path], trusted: Certificates, forks: None) -> Ends:
    """Read all damaged files in a process for each group of ways."""
    ways = GROUPS[request.param]
    ended = ends_of([(way, path) for way in ways for path in read_by(way, mutations)])

    def counted(of_fuzzers: bool) -> dict[str, Counter[str]]:
        some = {one: end for one, end in ended.items() if (Path(one[1]) in DAMAGED) is of_fuzzers}
        return {way: Counter(end.split(":")[0] for (one, _), end in some.items() if one == way) for way in ways}

    return Ends(counted(True), counted(False))


def test_there_are_damaged_streams_and_files() -> None:
    assert {path.parent for path in DAMAGED} == set(FOLDERS)


@pytest.mark.timeout(PATIENCE + DEADLINE)
def test_what_fuzzers_found(ends: Ends) -> None:
    for way, found in ends.found.items():
        assert found["refused"] > found.total() / 2, f"{way} reads what is damaged: {found}"
        assert found["valid"] or found.total() < len(DAMAGED), f"{way} reads nothing: {found}"


def test_mutations_of_golden_files(ends: Ends) -> None:
    for way, found in ends.mutated.items():
        assert found["refused"] > found.total() / 10, f"{way} reads what is damaged: {found}"
        assert found["valid"] > found.total() / 10, f"{way} reads nothing: {found}"


def read_by(way: str, mutations: list[Path]) -> Sequence[Path]:
    """Return the files that are read in a way."""
    files = [*DAMAGED, *mutations]
    if slow(way):
        return files[::SLOW]
    kind = way.split("-")[0]
    if kind not in SHARED or way in IN_PLACE:
        return files
    kin = [one for one in OURS if one.split("-")[0] == kind and not slow(one) and one not in IN_PLACE]
    return files[kin.index(way) :: len(kin)]


def ends_of(asked: list[tuple[str, Path]]) -> dict[tuple[str, str], str]:
    """Return the result of each way with a path. Fail if a result is missing, or if the process died."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with Fork("-m", "golden.damaged", env=environment, **pipes) as run:
        said, complained = run.communicate("\n".join(f"{way}\t{path}" for way, path in asked), PATIENCE)
    lines = [line.split("\t") for line in said.splitlines()]
    begun = [(way, path) for what, way, path, *_ in lines if what == "begin"]
    ended = {(way, path): end[0] for what, way, path, *end in lines if what == "end"}
    deadly = [one for one in begun if one not in ended]
    assert not deadly, f"the process died of {deadly}:\n{complained}"
    assert run.returncode == 0, complained
    assert {one: end for one, end in ended.items() if end.startswith("other")} == {}
    assert ended.keys() == {(way, str(path)) for way, path in asked}
    return ended
