from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("cffi", reason="cffi is not installed: pip install 'dissociated[ucx]'")

SCRIPT = """
import gc
from cffi import FFI
from dissociated.transport.native.library import view_of

gc.disable()
for make in (lambda: memoryview(bytearray(8)), lambda: memoryview(b"12345678")[2:], lambda: b"1", lambda: bytearray(8)):
    data, cycle = make(), []
    cycle += [view_of(FFI(), data), cycle]
    assert len(cycle[0]) == len(data)
    del data, cycle  # a connection with what it was sending may be such garbage
    gc.collect()
"""


def test_what_is_being_sent_may_be_collected_as_garbage() -> None:
    """Collect a cycle that is being sent. The process crashes here if cffi makes views of memoryviews."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
