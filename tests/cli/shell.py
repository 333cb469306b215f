"""Commands and scripts as a user runs them without a terminal: in processes of their own, or in this one."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from dissociated.cli import main
from support.helpers import PATIENCE
from support.processes import Fork

_STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


#: Variables of the environment that change what a command does or prints.
ENVIRONMENT = ("DISSOCIATED_CATALOG", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")


def run(*arguments: str | Path, status: int = 0) -> str:
    """Run the command in a process of its own, and return its output."""
    return _output(Fork("-m", "dissociated", *arguments, **_STREAMS), status)


def python(script: str) -> str:
    return _output(Fork("-c", script, **_STREAMS), 0)


def _output(process: Fork, status: int) -> str:
    with process:
        output: str = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == status, output
    return output


def call(
    *arguments: str | Path, given: bytes | io.TextIOWrapper = b"", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command within this process, which saves half a second, with `given` on its standard input."""
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(given))) if isinstance(given, bytes) else given
    written = [io.BytesIO(), io.BytesIO()]
    stdout, stderr = (io.TextIOWrapper(one, encoding="utf-8", write_through=True) for one in written)
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        for name, stream in {"stdin": stdin, "stdout": stdout, "stderr": stderr}.items():
            patch.setattr(sys, name, stream)
        try:
            status = main([*map(str, arguments)])
        except SystemExit as exit:
            status = int(exit.code or 0)
    return subprocess.CompletedProcess(
        [*map(str, arguments)], status, *(one.getvalue().decode(errors="replace") for one in written)
    )
