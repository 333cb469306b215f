from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import Process, Start


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def make(*arguments: str | Path) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield make
    for process in started:
        process.kill()


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
