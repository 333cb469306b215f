"""The benchmark of devices, which is the first thing to run on a new GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.helpers import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ["-m", "benchmarks", "device", "--device", "test:0", "--gigabytes", "0.02", "--rounds", "1"]
ROWS = ["pinned memory, the limit", "shm", "tcp", "shm, not registered", "registering alone", "1/16", "16/16"]


def test_one_command_measures_every_way_onto_a_device() -> None:
    ended = subprocess.run([sys.executable, *COMMAND], cwd=ROOT, capture_output=True, text=True, timeout=5 * PATIENCE)
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.splitlines()
    for row in ROWS:
        assert any(line.startswith(f"{row} ") for line in printed), row
