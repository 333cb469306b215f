"""Random mutations of good conversations: documented exceptions only, never a crash, never a hang. See fuzz.py.

DISSOCIATED_FUZZ says how many, of which seed: DISSOCIATED_FUZZ=100000,7.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dissociated import errors

from .conftest import Spawn

COUNT, SEED = (os.environ.get("DISSOCIATED_FUZZ", "600,1") + ",1").split(",")[:2]
PATIENCE = 30 + int(COUNT) / 50  # seconds

DOCUMENTED = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def played(process: subprocess.Popen[str]) -> tuple[dict[str, int], dict[str, str]]:
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, "it crashed"
    said = json.loads(out)
    return said["counts"], said["examples"]


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("role", ["client", "server", "file"])
def test_mutations(spawn: Spawn, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    schemes = ("tcp", "shm") if role != "file" else ("shm",)
    for process in [spawn("-m", "faults.fuzz", role, scheme, SEED, COUNT) for scheme in schemes]:
        counts, examples = played(process)
        allowed = {"read", "not valid"} | {f"ours: {name}" for name in DOCUMENTED}
        assert counts.keys() <= allowed, {what: examples[what] for what in counts.keys() - allowed}
        assert examples.get("read") == "0", "the conversation without mutations is good"
        if role != "server":
            assert counts["ours: RemoteProtocolError"] > 10
