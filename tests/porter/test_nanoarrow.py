"""The example in C that reads into nanoarrow, built with nanoarrow's sources, which `make nanoarrow` fetches."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from support.helpers import PATIENCE

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "build" / "nanoarrow" / "subprojects"


@pytest.fixture
def count(tmp_path: Path) -> Path:
    """Return the compiled example."""
    compiler = shutil.which("cc")
    if compiler is None or not SOURCES.exists():
        pytest.skip("there are no sources of nanoarrow, or there is no C compiler: make nanoarrow")
    nanoarrow = SOURCES / "arrow-nanoarrow" / "src"
    (flatcc,) = SOURCES.glob("flatcc-*/")
    config = (nanoarrow / "nanoarrow" / "nanoarrow_config.h.in").read_text()
    for name, value in {"VERSION_MAJOR": "0", "VERSION_MINOR": "0", "VERSION_PATCH": "0", "VERSION": "0"}.items():
        config = config.replace(f"@NANOARROW_{name}@", value)
    (tmp_path / "nanoarrow").mkdir()
    (tmp_path / "nanoarrow" / "nanoarrow_config.h").write_text(config.replace("@NANOARROW_NAMESPACE_DEFINE@", ""))
    peers = ROOT / "examples" / "peers"
    files = [peers / "nanoarrow.c", peers / "dissociated.c", *nanoarrow.glob("nanoarrow/common/*.c")]
    files += nanoarrow.glob("nanoarrow/ipc/*.c")
    files += [flatcc / "src" / "runtime" / f"{name}.c" for name in ("builder", "emitter", "refmap", "verifier")]
    folders = [f"-I{folder}" for folder in (tmp_path, nanoarrow, nanoarrow / "nanoarrow", flatcc / "include")]
    program = tmp_path / "count"
    subprocess.run([compiler, "-std=gnu11", "-w", *folders, "-o", program, *files], check=True)
    return program


def test_nanoarrow_reads_our_server(count: Path) -> None:
    table = pa.table({"n": [1, None, 3], "s": ["a", "b", None], "f": [1.5, 2.5, 3.5]})
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("data", table, ticket=b"abc")
        for uri in server.locations("data"):
            done = subprocess.run([count, uri, "abc"], capture_output=True, text=True, timeout=PATIENCE)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == "n: 3 rows, 1 nulls\ns: 3 rows, 1 nulls\nf: 3 rows, 0 nulls\n"
            refused = subprocess.run([count, uri, "none"], capture_output=True, text=True, timeout=PATIENCE)
            assert refused.returncode == 1
            assert "no dataset has this ticket" in refused.stderr
