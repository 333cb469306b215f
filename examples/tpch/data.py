"""The tables of TPC-H, made by tpchgen-cli as Parquet: at scale 1 about 6 million rows of lineitem, 1 GB as Arrow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

TABLES = ("region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem")


def generator() -> str | None:
    """The program of the package tpchgen-cli, wherever pip has put it."""
    return shutil.which("tpchgen-cli", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))


def generate(scale: float, directory: Path, tables: Sequence[str] = TABLES, parts: int = 8) -> None:
    """Write each table as Parquet files into a directory of its name.

    Raises OSError where the generator is missing, or says why it cannot.
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
