from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dissociated.errors import UriError
from dissociated.transport import registry
from dissociated.transport.framed.tcp import TcpTransport
from support.helpers import PATIENCE


def test_ours() -> None:
    assert isinstance(registry.transport("tcp"), TcpTransport)
    assert registry.transport("tcp") is registry.transport("tcp")
    assert {"inproc", "shm", "tcp"} <= registry.schemes()


def test_an_unknown_scheme_is_answered_with_those_there_are() -> None:
    with pytest.raises(UriError, match=r"no transport for gopher: here; there are .*shm, tcp"):
        registry.transport("gopher")


def test_third_parties_add_theirs_as_entry_points(tmp_path: Path) -> None:
    (tmp_path / "carrier.py").write_text("from dissociated.transport.framed.tcp import TcpTransport as Pigeon\n")
    info = tmp_path / "carrier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dissociated.transports]\npigeon = carrier:Pigeon\n")
    code = "\n".join(
        (
            "from dissociated.transport import registry",
            "print('pigeon' in registry.schemes(), type(registry.transport('pigeon')).__name__)",
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.stdout == "True TcpTransport\n"
