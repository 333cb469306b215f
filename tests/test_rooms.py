"""The rooms of the library: each imports only from rooms below it, and no import is circular."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

import dissociated
from support.sources import nodes, walk

ROOT = Path(dissociated.__file__).parent
#: Rooms from the top down. Errors and URIs are at the bottom, in no room. The public names are above all rooms.
FLOORS = (
    *(
        "cli",
        "spark",
        "torch",
        "adapters",
        "training",
        "node",
        "server",
        "catalog",
        "client",
        "monitoring",
        "datasets",
        "store",
        "ipc",
    ),
    *("control", "codec", "transport", "protocol", "memory", "format", "base"),
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
    """Yield every module of this library that `module` imports, also within functions, for types, and by a string."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes(MODULES[module]):
        for name in named(node, package):
            while name not in MODULES and "." in name:
                name = name.rpartition(".")[0]
            if name in MODULES and name != module:
                yield name


def named(node: ast.AST, package: str) -> list[str]:
    """Return the modules that a node of the syntax tree imports."""
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(place, names, level):
            base = resolve_name("." * level + (place or ""), package)
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Constant(str(text)) if re.fullmatch(r"dissociated(\.\w+)+(:\w+)?", text):
            module = text.partition(":")[0]
            return [module] if module in MODULES else []
    return []


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the modules of this library that each module imports."""
    return {module: {*imported(module)} for module in MODULES}


def floor(module: str) -> int:
    """Return how many rooms are above the module's room."""
    if module in TOP:
        return -1
    room = module.split(".")[1]
    return FLOORS.index(room) if room in FLOORS else len(FLOORS)


def room(module: str) -> str:
    return module.split(".")[1] if floor(module) in range(len(FLOORS)) else module


def test_every_folder_is_a_room_that_has_its_floor() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*FLOORS}


def test_each_file_of_the_base_is_used_by_several_rooms(imports: dict[str, set[str]]) -> None:
    for module in {*MODULES} - {*TOP, "dissociated.base"}:
        users = {room(user) for user, names in imports.items() if module in names}
        assert floor(module) < FLOORS.index("base") or len(users) > 1, f"{module} is for {users} alone"


def test_no_small_file_serves_one_other_alone(imports: dict[str, set[str]]) -> None:
    """A file under 60 lines with one importer belongs in that importer. Entry points have none."""
    users = {module: [user for user, names in imports.items() if module in names] for module in MODULES}
    small = {module for module, path in MODULES.items() if len(path.read_text().splitlines()) < 60}
    assert [f"{module} is for {users[module][0]} alone" for module in small if len(users[module]) == 1] == []


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


def classes() -> Iterator[ast.ClassDef]:
    for path in MODULES.values():
        yield from (node for node in nodes(path) if isinstance(node, ast.ClassDef))


def base_names(node: ast.ClassDef) -> set[str]:
    """Return the names of the bases of a class, without their modules and type arguments."""
    return {re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2] for base in node.bases}


def is_abstract(node: ast.ClassDef) -> bool:
    """Return whether a class has an abstract method."""
    methods = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    return any("abstractmethod" in map(ast.unparse, method.decorator_list) for method in methods)


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the methods and attributes that a class itself defines."""
    for part in walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(name)):
                yield name
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name


def test_an_abstraction_has_two_implementations() -> None:
    found = [*classes()]
    defined = {node.name: {*members(node)} for node in found if "Protocol" not in base_names(node)}
    lacking = {}
    for node in found:
        if "Protocol" in base_names(node):
            users = [name for name, names in defined.items() if names >= {*members(node)}]
        elif is_abstract(node):
            users = [each.name for each in found if node.name in base_names(each)]
        else:
            continue
        if len(users) < 2:
            lacking[node.name] = users
    assert lacking == {}
