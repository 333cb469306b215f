"""The examples of the bridges: each is short, does as it says, and is shown in docs/bridges.md in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "bridges"
#: Each example with the module that it needs, and the lines that it prints.
PRINTED = {
    "with_daft": ("daft", ["True 1000", "{'dest': ['MIA', 'ORD'], 'delay': [61.5, 92.0]}"]),
    "with_dagster": ("dagster", ["{'dest': ['MIA', 'ORD'], 'count_all': [500, 500]}"]),
    "with_dask": ("dask.dataframe", ["True 1000", "{'MIA': 61.5, 'ORD': 92.0}"]),
    "with_huggingface": (
        "datasets",
        ["True {'text': 'sentence 1', 'label': 1}", "500", "1000 {'text': 'sentence 999', 'label': 1}"],
    ),
    "with_ibis": ("ibis", ["[{'dest': 'MIA', 'mean': 61.5}, {'dest': 'ORD', 'mean': 92.0}]"]),
    "with_ray": ("ray.data", ["1000 [{'delay': 92.0}]"]),
}
PATIENCE = 280.0  # seconds; only failing tests wait this long


def test_each_is_short_and_shown_in_order() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "__init__"}
    for name in PRINTED:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40, name
    page = (ROOT / "docs" / "bridges.md").read_text()
    assert re.findall(r"examples/bridges/(\w+)\.py", page) == [*PRINTED]


@pytest.mark.timeout(300)  # Ray starts a cluster
@pytest.mark.parametrize("name", PRINTED)
def test_each_prints_what_it_found(name: str) -> None:
    module, lines = PRINTED[name]
    pytest.importorskip(module, reason=f"{module} is not installed: make bridges")
    command = [sys.executable, "-m", f"examples.bridges.{name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-len(lines) :] == lines
