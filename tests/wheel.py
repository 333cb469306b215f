"""Install a wheel into a fresh environment of each Python of this machine, and try it there.

python tests/wheel.py WHEEL
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The minor versions of Python 3 that the package supports.
SUPPORTED = range(11, 15)

SMOKE = """\
import sys
import pyarrow as pa
import dissociated as dis

table = pa.table({"n": range(1000), "s": [str(n) for n in range(1000)]})
with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    server.publish("smoke", table)
    with dis.connect(server.catalog_uri) as client:
        assert client.read("smoke").read_all().equals(table)
    for uri in server.locations("smoke"):
        assert dis.open_stream(uri, server.ticket("smoke")).read_all().equals(table)
assert "site-packages" in dis.__file__
print("ok", dis.__version__, sys.version.partition(" ")[0], pa.__version__)
"""


def pythons() -> dict[int, str]:
    """Return the supported Pythons of this machine by their minor version."""
    homes = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"]
    candidates = [sys.executable, *(f"python3.{minor}" for minor in SUPPORTED)]
    candidates += [str(path) for home in homes for path in sorted(home.glob("3.*/bin/python3"))]
    found: dict[int, str] = {}
    for candidate in candidates:
        program = shutil.which(candidate)
        if program is None:
            continue
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        version = re.match(r"Python 3\.(\d+)", done.stdout)
        if version and int(version[1]) in SUPPORTED:
            found.setdefault(int(version[1]), program)
    return found


def try_wheel(program: str, wheel: Path) -> None:
    """Install the wheel into a new environment of this Python, and run the smoke test and the command."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "-m", "venv", folder], check=True)
        binaries = Path(folder) / "bin"
        install = [
            str(binaries / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            str(wheel),
        ]
        subprocess.run(install, check=True)
        subprocess.run([binaries / "python", "-W", "error", "-c", SMOKE], check=True, cwd=folder, timeout=120)
        subprocess.run([binaries / "dissociated", "--version"], check=True, cwd=folder, timeout=60)


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    for minor, program in sorted(pythons().items()):
        print(f"Python 3.{minor}: {program}", flush=True)
        try_wheel(program, wheel)


if __name__ == "__main__":
    main()
