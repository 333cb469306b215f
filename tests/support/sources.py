"""The syntax trees of the sources, parsed once for all tests that read them: `conftest.py` runs these in one worker."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def _trees() -> dict[Path, ast.Module]:
    root = Path(__file__).parents[2]
    gc.collect()
    gc.disable()  # Looking for garbage among the new nodes would take twice as long as the parser.
    try:
        return {path: ast.parse(path.read_text()) for room in ("src", "tests") for path in root.glob(f"{room}/**/*.py")}
    finally:
        gc.freeze()  # The nodes stay to the end of the run, and many later tests collect garbage.
        gc.enable()


def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    found = _trees().get(path)
    return ast.parse(path.read_text()) if found is None else found


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, in the order of `ast.walk`."""
    return walk(tree(path))


def walk(top: ast.AST) -> list[ast.AST]:
    """Return all nodes of a tree, in the order of `ast.walk` and in two thirds of its time."""
    found = [top]
    for node in found:  # which grows meanwhile
        for value in vars(node).values():
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return found
