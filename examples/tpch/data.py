"""The tables of TPC-H, generated as Parquet by tpchgen-cli. At scale 1, lineitem has 6 million rows, 1 GB as Arrow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

TABLES = ("region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem")


def generator() -> str | None:
    """Return the path of the program tpchgen-cli, or None if it is not installed."""
    return shutil.which("tpchgen-cli", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))


def generate(scale: float, directory: Path, tables: Sequence[str] = TABLES, parts: int = 8) -> None:
    """Write each table as Parquet files into a directory of its name.

    Raises:
        OSError: The generator is not installed, or fails.
    """
    program = generator()
    if program is None:
        raise FileNotFoundError("tpchgen-cli is not installed: pip install 'dissociated[spark,demo]'")
    arguments = ["--scale-factor", f"{scale:g}", "--output-dir", str(directory), "--parts", str(parts), "--quiet"]
    run = subprocess.run(
        [program, "parquet", *arguments, "--tables", ",".join(tables)], capture_output=True, text=True, errors="replace"
    )
    if run.returncode:
        raise OSError(f"tpchgen-cli failed: {run.stderr.strip() or run.returncode}")
