"""Random conversations and requests: they cause documented exceptions only, never a crash or a hang. See fuzz.py.

The environment variable DISSOCIATED_FUZZ sets the count and the seed: DISSOCIATED_FUZZ=100000,7. A longer run with
other seeds: `python -m faults.fuzz --seconds 600`, in the folder `tests`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from .conftest import Spawn
from .requests import ROLES

COUNT, SEED = (os.environ.get("DISSOCIATED_FUZZ", "300,1") + ",1").split(",")[:2]
PATIENCE = 60 + int(COUNT) / 50  # seconds


def played(process: subprocess.Popen[str]) -> tuple[dict[str, int], dict[str, str]]:
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, "it crashed"
    said = json.loads(out)
    assert said["unexpected"] == {}
    return said["counts"], said["examples"]


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("role", ["client", "server", "file"])
def test_mutations(spawn: Spawn, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    schemes = ("tcp", "shm") if role != "file" else ("shm",)
    for process in [spawn("-m", "faults.fuzz", role, scheme, SEED, COUNT) for scheme in schemes]:
        counts, examples = played(process)
        assert examples.get("read") == "0", "the conversation without mutations is good"
        if role != "server":
            assert counts["ours: RemoteProtocolError"] > 10


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("role", [*ROLES])
def test_hostile_requests(spawn: Spawn, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Run each role in its own process, because a filter may crash it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    counts, _ = played(spawn("-m", "faults.fuzz", role, "tcp", SEED, COUNT))
    assert counts["read"] > int(COUNT) // 50
