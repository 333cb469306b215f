"""Names in the source: a participle or a pronoun has a noun beside it, and a class or a type has a name of its own."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from support.sources import nodes, tree

SOURCE = Path(__file__).parents[1] / "src" / "dissociated"
#: Words that say nothing alone, with or without underscores at their ends.
ALONE = re.compile(
    "_*(given|taken|said|found|left|ones?|theirs|told|asked|wanted|what|ours|mine|others|rest|made|known|shown|seen|"
    "ended|begun|gone|done|over|meant|got|used|used_up|kept|held|sent|which|whom?|those|these|that|it|them|came|went|lent)_*"
)
#: Fields whose names are keys in files or in answers, or that the guide documents.
KEYS = {
    ("control/locations.py", "seen"),
    ("monitoring/status.py", "done"),
    ("monitoring/status.py", "gone"),
    ("monitoring/status.py", "held"),
    ("monitoring/status.py", "kept"),
    ("store/numbers.py", "used"),
    ("control/version.py", "seen"),
}

#: Names with two meanings, which other projects chose: Arrow in C++ for `ipc`, and UCX for the transports.
SHARED = {"Listener"}


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each function, class, parameter, attribute and variable that is defined."""
    for node in nodes(path):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass


def modules() -> dict[str, Path]:
    """Return the file of each module by its path below the library."""
    return {path.relative_to(SOURCE).as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}


def test_names_have_a_noun() -> None:
    assert len(modules()) > 100
    assert [
        f"{place}:{line}: {name}"
        for place, path in modules().items()
        for line, name in names(path)
        if ALONE.fullmatch(name) and (place, name) not in KEYS
    ] == []


def types_of(module: ast.Module) -> Iterator[str]:
    """Yield the name of each public class and type alias of a module."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name("TypeAlias")):
                if not name.startswith("_"):
                    yield name
            case _:
                pass


def test_a_name_of_a_type_means_one_thing() -> None:
    places = defaultdict(list)
    for place, path in modules().items():
        for name in types_of(tree(path)):
            places[name].append(place)
    assert len(places) > 300
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1 and name not in SHARED} == {}
