"""The benchmark of devices, which is the first thing to run on a new GPU: `python -m benchmarks device`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROWS = ["pinned memory, the limit", "shm", "tcp", "shm, not registered", "registering alone", "1/16", "16/16"]


def test_every_way_onto_a_device_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from benchmarks import device

    device.run(gigabytes=0.02, rounds=1, name="test:0")
    printed = capsys.readouterr().out.splitlines()
    for row in ROWS:
        assert any(line.startswith(f"{row} ") for line in printed), row
