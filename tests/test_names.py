"""Names in the source tell what they hold: a participle or a pronoun has a noun beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "dissociated"
#: Words that say nothing alone, with or without underscores at their ends.
ALONE = re.compile(
    "_*(given|taken|said|found|left|ones?|theirs|told|asked|wanted|what|ours|mine|others|rest|made|known|shown|seen|"
    "ended|begun|gone|done|over|meant|got|used|kept|held|which|whom?|those|these|that|it|them|came|went|lent)_*"
)
#: Fields whose names are keys in files or in answers, or that the guide documents.
KEYS = {
    ("control/locations.py", "seen"),
    ("monitoring/status.py", "done"),
    ("monitoring/status.py", "gone"),
    ("monitoring/status.py", "held"),
    ("monitoring/status.py", "kept"),
    ("store/numbers.py", "used"),
    ("store/version.py", "seen"),
}


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each function, class, parameter, attribute and variable that is defined."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case _:
                pass


def test_names_have_a_noun() -> None:
    places = {path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")}
    assert len(places) > 100
    assert [
        f"{place}:{line}: {name}"
        for place in sorted(path.as_posix() for path in places)
        for line, name in names(ast.parse((SOURCE / place).read_text()))
        if ALONE.fullmatch(name) and (place, name) not in KEYS
    ] == []
