"""Commands and scripts as a user runs them: in processes of their own, without a terminal."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.helpers import PATIENCE
from support.processes import Fork

_STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


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
