"""Pin the packages of the image, with the hashes of their wheels: run `python deploy/pin.py` in a checkout.

The result is for the Python of the image, on x86-64 and on 64-bit ARM. Review the change, and commit it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

DEPLOY = Path(__file__).resolve().parent
PYTHON = "3.12"
PLATFORMS = [[f"{tag}_{machine}" for tag in ("manylinux_2_28", "manylinux2014")] for machine in ("x86_64", "aarch64")]


def pins(requirements: list[str]) -> str:
    """Return a requirements file of these packages and all that they need."""
    hashes: dict[str, set[str]] = {}
    for platforms in PLATFORMS:
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
            command += ["--only-binary", ":all:", "--target", directory, "--report", "-", "--python-version", PYTHON]
            command += [f"--platform={platform}" for platform in platforms]
            report = subprocess.run([*command, *requirements], stdout=subprocess.PIPE, check=True)
        for one in json.loads(report.stdout)["install"]:
            pin = f"{one['metadata']['name'].lower()}=={one['metadata']['version']}"
            hashes.setdefault(pin, set()).add(one["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = ["# Written by deploy/pin.py."]
    for pin, found in sorted(hashes.items()):
        lines.append(" \\\n    ".join([pin, *(f"--hash=sha256:{value}" for value in sorted(found))]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["metrics"]
    (DEPLOY / "requirements.txt").write_text(pins(needed))
    (DEPLOY / "build-requirements.txt").write_text(pins(project["build-system"]["requires"]))
