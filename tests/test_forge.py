"""The files for a public forge: their steps are targets of the Makefile, and their versions are the package's."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from support.helpers import case
from wheel import SUPPORTED, pythons

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIGURATION["project"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_of_a_workflow_is_a_target(path: Path) -> None:
    steps = re.findall(r"- run: (.*)", path.read_text())
    assert steps
    for step in steps:
        target = re.match(r"make ([a-z-]+)", step)
        assert target is not None, step
        assert target[1] in TARGETS, step
    assert "run: |" not in path.read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_an_action_is_named_by_its_commit(path: Path) -> None:
    # A tag can be moved to other code, which would then run with the workflow's rights.
    actions = re.findall(r"uses: (.*)", path.read_text())
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_every_file_of_the_forge_is_yaml() -> None:
    for path in (ROOT / ".github").rglob("*.yml"):
        with case(path.name):
            assert yaml.safe_load(path.read_text())


def test_the_hooks_run_what_lint_runs() -> None:
    assert re.findall("entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text()) == ["make lint"]


def test_the_same_pythons_are_tested_and_named() -> None:
    minors = [*map(str, SUPPORTED)]
    prefix = "Programming Language :: Python :: 3."
    assert [one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)] == minors
    assert PROJECT["requires-python"] == f">=3.{minors[0]}"
    ci = (ROOT / ".github/workflows/ci.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", ci)
    assert re.findall(r"3\.(\d+)", matrix) == minors
    for path in WORKFLOWS:
        for some in re.findall(r"python-version: \|\n((?: +3\.\d+\n)+)", path.read_text()):
            assert sorted(re.findall(r"3\.(\d+)", some)) == minors


def test_every_bridge_has_an_extra_and_an_example() -> None:
    extras = PROJECT["optional-dependencies"]
    bridges = re.findall(r"`pip install 'dissociated\[(\w+)\]'`", (ROOT / "docs/bridges.md").read_text())
    assert len(bridges) > 5
    assert [name for name in bridges if name not in extras] == []
    assert extras["bridges"] == [f"dissociated[{','.join(sorted(bridges))}]"]
    assert sorted(path.stem for path in (ROOT / "examples/bridges").glob("with_*.py")) == sorted(
        f"with_{name}" for name in bridges
    )


def test_one_version_everywhere(tmp_path: Path) -> None:
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert CONFIGURATION["tool"]["hatch"]["version"]["fallback-version"] == cited
    deployed = "".join(path.read_text() for path in (ROOT / "deploy/kubernetes").glob("*.yaml"))
    assert {*re.findall(r"(?:image: dissociated:|newTag: )\"?([^\s\"]+)", deployed)} == {cited}
    (tmp_path / "build/dist").mkdir(parents=True)
    (tmp_path / f"build/dist/dissociated-{cited}.tar.gz").touch()
    for name in ("Makefile", "CITATION.cff", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    check = ["make", "--silent", "check-tag"]
    assert subprocess.run([*check, f"TAG=v{cited}"], cwd=tmp_path, check=False).returncode == 0
    assert subprocess.run([*check, "TAG=v99.0.0"], cwd=tmp_path, check=False).returncode != 0


def test_the_wheel_is_tried_on_the_pythons_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python3.14"
    fake.write_text("#!/bin/sh\necho Python 3.14.2\n")
    old = tmp_path / "versions/3.10.1/bin/python3"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho Python 3.10.1\n")
    for program in (fake, old):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    found = pythons()
    assert found[sys.version_info.minor] == sys.executable
    assert found[14] == str(fake)
    assert 10 not in found
