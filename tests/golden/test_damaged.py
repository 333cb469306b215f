"""What Arrow's fuzzers found: however it is read, it ends in a documented exception, or in a table one can check."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import groupby

import pytest

from .damaged import DEADLINE, MORE_MEMORY
from .ways import NO_ROOT, ROOT, WAYS

FOLDERS = [ROOT / "arrow-ipc-stream", ROOT / "arrow-ipc-file"] if ROOT else []
DAMAGED = sorted(path for folder in FOLDERS for path in folder.iterdir() if path.is_file())

#: Ways that share a process. libarrow's own is none of ours.
OURS = [way for way in WAYS if way != "libarrow"]
GROUPS = [list(ways) for _, ways in groupby(OURS, lambda way: MORE_MEMORY.get(way, way.split("-")[0]))]

pytestmark = pytest.mark.skipif(ROOT is None, reason=NO_ROOT)


def test_there_are_damaged_streams_and_files() -> None:
    assert {path.parent for path in DAMAGED} == set(FOLDERS)


@pytest.mark.timeout(10 * DEADLINE)
@pytest.mark.parametrize("ways", GROUPS, ids=lambda ways: "+".join(ways))
def test_damage_is_refused_or_can_be_found(ways: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "golden.damaged", *ways],
        input="\n".join(map(str, DAMAGED)),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=9 * DEADLINE,
    )
    lines = [line.split("\t") for line in run.stdout.splitlines()]
    begun = [(way, path) for what, way, path, *_ in lines if what == "begin"]
    ended = {(way, path): end[0] for what, way, path, *end in lines if what == "end"}
    deadly = [one for one in begun if one not in ended]
    assert not deadly, f"the process died of {deadly}:\n{run.stderr}"
    assert run.returncode == 0, run.stderr
    assert {one: end for one, end in ended.items() if end.startswith("other")} == {}
    assert ended.keys() == {(way, str(path)) for way in ways for path in DAMAGED}
    for way in ways:
        ends = Counter(end.split(":")[0] for (one, _), end in ended.items() if one == way)
        assert ends["refused"] > len(DAMAGED) / 2, f"{way} reads what is damaged: {ends}"
        assert ends["valid"], f"{way} reads nothing: {ends}"
