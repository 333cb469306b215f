"""The rooms of the house: each imports only what is below it, and nothing imports in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dissociated

ROOT = Path(dissociated.__file__).parent
#: From the top down. What is in no room is on the ground, but for the public names, which stand on everything.
FLOORS = (
    *("cli", "spark", "torch", "training", "node", "server", "catalog", "monitoring", "client", "datasets"),
    *("ipc", "store", "codec", "transport", "protocol", "memory", "format"),
)
TOP = ("dissociated", "dissociated.__main__")


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """Everything of ours that a module imports, wherever in it, for its types too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name not in MODULES and "." in name:
                name = name.rpartition(".")[0]
            if name in MODULES and name != module and not module.startswith(f"{name}."):
                yield name


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Of each module what it imports of ours."""
    return {module: {*imported(module)} for module in MODULES}


def floor(module: str) -> int:
    """How far below the top a module stands."""
    if module in TOP:
        return -1
    room = module.split(".")[1]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def room(module: str) -> str:
    return module.split(".")[1] if floor(module) in range(len(FLOORS)) else module


def test_every_folder_is_a_room_that_has_its_floor() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*FLOORS}


def test_no_room_imports_upward(imports: dict[str, set[str]]) -> None:
    upward = {
        module: names
        for module in MODULES
        if (names := [name for name in imports[module] if floor(name) < floor(module) and room(name) != room(module)])
    }
    assert upward == {}


def test_no_file_imports_in_a_circle(imports: dict[str, set[str]]) -> None:
    below = {module: set(names) for module, names in imports.items()}
    while leaves := [module for module, names in below.items() if not names]:
        for leaf in leaves:
            del below[leaf]
        for names in below.values():
            names.difference_update(leaves)
    assert below == {}
