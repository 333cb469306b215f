"""The first examples: each is short, does as it says, and is linked from the README in order.

tests/spark/test_quickstart.py runs the example with Spark.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from dissociated.node.launch import running
from support.certificates import certificates
from support.processes import Fork

pytestmark = pytest.mark.usefixtures("forks")

ROOT = Path(__file__).resolve().parents[1]
BASICS = ROOT / "examples" / "basics"
ORDER = ["publish", "read", "filter", "live", "put", "with_spark", "with_torch", "service"]
PATIENCE = 120.0  # seconds; only failing tests wait this long


def run(name: str, *arguments: str) -> list[str]:
    """Run an example, and return the lines that it prints."""
    module = f"examples.basics.{name}"
    with Fork("-m", module, *arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return output.splitlines()


def test_each_is_short_and_linked_in_order() -> None:
    assert {path.stem for path in BASICS.glob("*.py")} == {*ORDER, "__init__"}
    for name in ORDER:
        assert len((BASICS / f"{name}.py").read_text().splitlines()) < 40, name
    assert re.findall(r"examples/basics/(\w+)\.py", (ROOT / "README.md").read_text()) == ORDER


def test_publish_read_and_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    with Fork("-m", "examples.basics.publish", cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        name, _, uri = server.stdout.readline().strip().removeprefix("export ").partition("=")
        monkeypatch.setenv(name, uri)
        read, filtered = run("read"), run("filter")
        server.communicate("\n", PATIENCE)
        assert server.returncode == 0
    assert read[1].split()[:2] == ["flights", "5"]
    assert read[-2:] == ["['IAH', 'IAH', 'MIA', 'BQN', 'ORD']", "5 rows over tcp"]
    assert filtered == [
        "[{'dest': 'MIA', 'delay': 92.0}, {'dest': 'ORD', 'delay': 61.5}]",
        "3",
        "76.75",
        "[('EWR', 2), ('JFK', 2), ('LGA', 1)]",
    ]


def test_live() -> None:
    assert run("live") == ["[0, 1, 2, 3, 4]"] * 2


def test_put(own_store: Path) -> None:
    assert run("put")[0] == "[149, 149, 178] {'of': 'basics'}"
    assert running(own_store) is not None
    assert run("put")[0] == "[149, 149, 178] {'of': 'basics'}"


def test_with_torch() -> None:
    pytest.importorskip("torch")
    assert run("with_torch") == ["y = 3.00 x + 2.00"]


def test_service(tmp_path: Path) -> None:
    issued = certificates(tmp_path)
    assert run("service", issued.cert, issued.key, issued.roots) == [
        "[{'city': 'Oslo', 'total': 5}, {'city': 'Rome', 'total': 7}]",
        "[{'city': 'Rome', 'price': 3}]",
    ]
