from __future__ import annotations

import subprocess
import sys
from functools import cache

import pytest

from dissociated.transport.native.fabric import _ofi

LOAD = "import ctypes; ctypes.CDLL('libfabric.so.1')"


@cache
def _missing() -> str | None:
    """Why this system has no libfabric. Found out elsewhere: a process that has loaded the wheel's finds that one."""
    tried = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True)
    return tried.stderr.splitlines()[-1] if tried.returncode else None


@pytest.fixture(params=["wheel", "system"])
def library(request: pytest.FixtureRequest) -> str:
    """Each libfabric there is."""
    if request.param == "wheel":
        found = _ofi.wheel_libraries()
        if not found:
            pytest.skip("the wheel mpich is not installed")
        return str(found[0])
    if reason := _missing():
        pytest.skip(f"there is no libfabric on this system: {reason}")
    return "libfabric.so.1"
