from __future__ import annotations

import ctypes

import pytest

from dissociated.transport import _ofi


@pytest.fixture(params=["wheel", "system"])
def library(request: pytest.FixtureRequest) -> str:
    """Each libfabric there is."""
    if request.param == "wheel":
        found = _ofi.wheel_libraries()
        if not found:
            pytest.skip("the wheel mpich is not installed")
        return str(found[0])
    try:
        ctypes.CDLL("libfabric.so.1")
    except OSError:
        pytest.skip("there is no libfabric.so.1 on this system")
    return "libfabric.so.1"
