"""Tests use the library as its users and peers do: none reads, replaces or imports a private name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from textwrap import dedent

from cluster.prove import TESTED
from support.sources import nodes, walk

TESTS = Path(__file__).parent
#: Names that their documentation makes public in spite of the underscore, of named tuples and of modules.
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit"}
#: Files that use private attributes, with the reason.
EXCEPTIONS = {
    "device/test_training.py": "PyTorch has no public way to register a backend from Python",
    "support/forks.py": "atexit and threading have no public way to end as an interpreter does",
    "support/tracing.py": "OpenTelemetry has no public way to replace its provider of tracers",
    "support/jvm.py": "PySpark has no public way to its Java process",
}


def is_private(name: str) -> bool:
    """Return whether a name begins with an underscore, and is not one that a protocol gives, such as `_repr_html_`."""
    return name.startswith("_") and not name.endswith("_") and name not in PUBLIC


def is_own(node: ast.expr) -> bool:
    """Return whether an expression is the object whose class the code is in, such as `self` or `super()`."""
    match node:
        case ast.Name("self" | "cls") | ast.Call(ast.Name("super")):
            return True
    return False


def private_names(code: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private attribute and import in `code`, and in the programs among its strings."""
    for node in code:
        match node:
            case ast.Attribute(value, name) if is_private(name) and not is_own(value):
                yield node.lineno, ast.unparse(node)
            case ast.Call(ast.Attribute(attr="setattr" | "delattr" | "setitem"), [place, *others]):
                values = [each.value for each in (place, *others[:1]) if isinstance(each, ast.Constant)]
                texts = [text for text in values if isinstance(text, str)]
                yield from ((node.lineno, text) for text in texts if is_private(text.rpartition(".")[2]))
            case ast.ImportFrom(module=str(module)) if module.startswith("dissociated"):
                names = [*module.split("."), *(alias.name for alias in node.names)]
                yield from ((node.lineno, f"{module}: {name}") for name in names if is_private(name))
            case ast.Import(names):
                paths = [alias.name for alias in names if alias.name.startswith("dissociated")]
                yield from ((node.lineno, path) for path in paths if any(map(is_private, path.split("."))))
            case ast.Constant(str(text)) if "import dissociated" in text or "from dissociated" in text:
                try:
                    program = walk(ast.parse(dedent(text)))
                except SyntaxError:
                    continue  # a part of a program, or a sentence
                yield from ((node.lineno + line - 1, name) for line, name in private_names(program))
            case _:
                pass


def test_no_test_reaches_into_the_library() -> None:
    files = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("*.py")}
    assert len(files) > 200
    found = {
        name: [f"{name}:{line}: {private}" for line, private in private_names(nodes(path))]
        for name, path in files.items()
    }
    assert [place for name, places in found.items() if name not in EXCEPTIONS for place in places] == []
    assert [name for name in EXCEPTIONS if not found[name]] == [], "these need no exception any more"


def test_private_names_are_found() -> None:
    code = """
import LIBRARY._a
from LIBRARY.b import _c
from LIBRARY._d import e
self._f, super()._g, h._replace(), i._repr_html_(), j.__class__, k._l._m
"from LIBRARY.n import o\\no._p = 1"
"    from LIBRARY.q import r\\n    r._s = 1"
monkeypatch.setattr("LIBRARY.t._u", 1), monkeypatch.setattr(v, "_w", x)
"""
    found = [name for _, name in private_names(walk(ast.parse(code.replace("LIBRARY", "dissociated"))))]
    assert sorted(name[name.rindex("_") :] for name in found) == ["_a", "_c", "_d", "_l", "_m", "_p", "_s", "_u", "_w"]


def test_the_proof_of_several_hosts_names_tests_that_exist() -> None:
    for named in chain.from_iterable(TESTED.values()):
        path, _, name = named.partition("::")
        assert f"\ndef {name}(" in (TESTS / path).read_text()
