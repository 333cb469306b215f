"""The measure of plain English: these figures find the sentences that a reader has to solve."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.sources import tree

ROOT = Path(__file__).parents[1]
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
#: A comment after "#" or "#:", on a line of its own or after two spaces. It is quicker than a tokenizer.
COMMENT = re.compile(r"(?:^ *|  )#:? (?!type:|noqa)(.*)$", re.MULTILINE)
#: A sentence that opens with one of these hides its subject.
OPENERS = {"what", "who", "whoever", "whatever", "those", "one", "ones", "where", "same", "as"}
#: British spelling, with "-ize" as in `serialize` and `authorize`.
OTHER_SPELLING = re.compile(
    r"(recogn|organ|initial|normal|optim|summar|minim|maxim|serial|synchron|author)is(e|ed|es|ing|ation)"
    r"|(behavi|neighb|lab|fav)or(s|ed|ing|al|less)?"
)
SECTION = re.compile(r"^(?:Args|Attributes|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
#: A description that does not begin a sentence, such as "if the file is missing". Names of libraries may begin one.
ENTRY = re.compile(r"^    (?! )[\w.*`, ]+: (?!lib[a-z]+\b|cffi\b|pyarrow\b|grpc)([a-z][^.(]*)", re.MULTILINE)
#: The sources in the repository, each with the ending of its files.
PLACES = [("src", "py"), ("tests", "py"), ("benchmarks", "py"), ("examples", "py"), ("docs", "md"), (".", "md")]


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings in a module or a statement. Expressions have none, and are most of a syntax tree."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        below = getattr(node, name, ())
        for statement in below if isinstance(below, list) else ():
            yield from docstrings(statement)


def texts(path: Path) -> Iterator[str]:
    """Yield each docstring and comment of a Python file, or each paragraph of a page, without its code."""
    content = path.read_text()
    if path.suffix == ".md":
        for block in re.sub(r"```.*?```", "", content, flags=re.DOTALL).split("\n\n"):
            if not block.lstrip().startswith(("|", "<", "#")):
                yield block
        return
    yield from docstrings(tree(path))
    yield from COMMENT.findall(content)


def sentences(text: str) -> Iterator[list[str]]:
    """Yield the words of each sentence in lower case, without a leading article."""
    for sentence in re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*[-*]\s", re.sub(r"`[^`]*`", "X", text)):
        words = [word.lower() for word in WORD.findall(sentence)]
        if words and not sentence.rstrip().endswith("?"):
            yield words[1:] if words[0] == "the" and len(words) > 1 else words


@pytest.mark.parametrize(("place", "ending"), PLACES, ids=[place for place, _ in PLACES])
def test_sentences_name_their_subject(place: str, ending: str) -> None:
    found = (ROOT / place).glob(f"*.{ending}") if place == "." else (ROOT / place).rglob(f"*.{ending}")
    written = [(path, text) for path in found for text in texts(path)]
    spoken = [(path, words) for path, text in written for words in sentences(text)]
    hard = [f"{path.relative_to(ROOT)}: {' '.join(words)[:80]}" for path, words in spoken if words[0] in OPENERS]
    assert len(spoken) > 20
    assert len(hard) <= 0.015 * len(spoken), hard
    counts = Counter(word for _, words in spoken for word in words)
    assert counts["what"] <= max(1, 0.002 * counts.total())
    assert {word for word in counts if OTHER_SPELLING.fullmatch(word)} == set()
    entries = [
        (path, entry) for path, text in written for lines in SECTION.findall(text) for entry in ENTRY.findall(lines)
    ]
    assert [f"{path.relative_to(ROOT)}: {entry}" for path, entry in entries] == []
