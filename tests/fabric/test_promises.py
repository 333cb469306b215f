"""Another libfabric than the one that pip installed, named by DISSOCIATED_FABRIC_LIBRARY."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dissociated.transport.native.fabric.libfabric import installed_library, ofi
from support.helpers import PATIENCE

pytestmark = pytest.mark.needs("libfabric")

#: Loads libfabric, and prints its version and the signals that it handles.
LOAD = """
def handlers():
    status = dict(row.split(":", 1) for row in open("/proc/self/status").read().splitlines())
    return int(status["SigCgt"], 16) & 0x7FFFFFFF  # later ones are the C library's own
caught = handlers()
from dissociated.transport.native.fabric.libfabric import ofi
print(ofi().version, handlers() == caught)
"""


def test_loading_takes_no_signals() -> None:
    said = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, timeout=PATIENCE, check=True)
    version, untouched = said.stdout.split()
    assert untouched == "True"
    assert tuple(map(int, version.split("."))) >= (1, 17)


@pytest.mark.timeout(420)
def test_the_promises_of_a_transport_are_kept() -> None:
    if ofi().path == str(installed_library()):
        pytest.skip("DISSOCIATED_FABRIC_LIBRARY names no other libfabric; everything else runs with this one")
    done = subprocess.run(
        [sys.executable, "-m", "fabric.promises"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
