from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dissociated.transport.native.fabric._ofi import ofi
from helpers import PATIENCE

#: Loads libfabric, and tells its version and which signals it took.
LOAD = """
def handlers():
    status = dict(row.split(":", 1) for row in open("/proc/self/status").read().splitlines())
    return int(status["SigCgt"], 16) & 0x7FFFFFFF  # later ones are the C library's own
caught = handlers()
from dissociated.transport.native.fabric._ofi import ofi
print(ofi().version, handlers() == caught)
"""


def test_loading_takes_no_signals(library: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**os.environ, "DISSOCIATED_FABRIC_LIBRARY": library},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    version, untouched = said.stdout.split()
    assert untouched == "True"
    assert tuple(map(int, version.split("."))) >= (1, 17)


@pytest.mark.needs("libfabric")
@pytest.mark.timeout(420)
def test_the_promises_of_a_transport_are_kept(library: str) -> None:
    if library == ofi().path:
        pytest.skip("everything else runs with this one")
    done = subprocess.run(
        [sys.executable, "-m", "fabric.promises"],
        env={**os.environ, "DISSOCIATED_FABRIC_LIBRARY": library, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
