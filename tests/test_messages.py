"""Every message that the library raises or logs: CONTRIBUTING.md describes their form."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from dissociated import errors
from support.sources import nodes

SOURCE = Path(__file__).parents[1] / "src" / "dissociated"
#: A message that begins with one of these hides its subject.
OPENERS = {"what", "where", "who", "whoever", "those", "one", "ones", "same", "as", "it", "its", "they", "these"}
#: Words of riddles. A reader has to find the subject, or the meaning of the verb.
RIDDLES = re.compile(
    r"\b(?:nobody|somebody|whoever|whatever|as yet|so many|such a one|let go|good no more|beside that"
    r"|what (?:is|was|are|were|lies|lay|came|comes|goes|it|they)|who (?:is|asks|reads|comes|shall)"
    r"|(?<!there )is no(?! longer\b| space\b| memory\b)(?= [a-z])|is not there)\b"
)
#: Words that begin with a capital letter wherever they stand.
PROPER = {"Arrow", "Daft", "Dask", "DuckDB", "Flight", "Java", "Polars", "Python", "Spark"}
#: Names of variables whose values are texts of the user, which are quoted.
USER_TEXTS = {"directory", "file", "path", "pattern", "text", "written"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: Methods of logs whose first argument is the level: those of `logging.Logger` and of `LimitedLog`.
WITH_LEVEL = {"log", "write"}
#: Lines for each message of the protocol, which are a transcript: docs/access.md describes them.
TRANSCRIPTS = "transport/trace.py"


class Message(NamedTuple):
    """A template of a message, in which `{expression}` or `{expression!r}` stands for a value."""

    place: str
    text: str
    quoted: tuple[str, ...]
    bare: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def templates(node: ast.expr) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield the text of each string that an expression can be, with its quoted and its unquoted values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value, (), ()
    elif isinstance(node, ast.IfExp):
        yield from templates(node.body)
        yield from templates(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        text = ""
        quoted: list[str] = []
        bare: list[str] = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = ast.unparse(part.value)
                text += f"{{{value}}}"
                (quoted if part.conversion == ord("r") else bare).append(value)
        yield text, tuple(quoted), tuple(bare)


def modules() -> list[tuple[str, list[ast.AST]]]:
    """Return the name of each module, and the nodes of its syntax tree."""
    return [(str(path.relative_to(SOURCE)), nodes(path)) for path in sorted(SOURCE.rglob("*.py"))]


def called(node: ast.Call) -> str:
    """Return the last name of the called expression, or of `X` in `X.for_peer(...)`."""
    match node.func:
        case ast.Attribute(ast.Name(name) | ast.Attribute(attr=name), "for_peer"):
            return name
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


ERRORS = {
    name
    for place in (vars(errors), vars(__import__("builtins")))
    for name, kind in place.items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


def _raised() -> Iterator[Message]:
    for name, within in modules():
        for node in within:
            if isinstance(node, ast.Call) and called(node) in ERRORS:
                for argument in node.args:
                    for text, quoted, bare in templates(argument):
                        if " " in text:
                            yield Message(f"{name}:{node.lineno}", text, quoted, bare)


def log_calls() -> Iterator[tuple[str, ast.expr]]:
    """Yield the place of each log call, and the argument that is its message."""
    for name, within in modules():
        for node in within:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method, owner = node.func.attr, node.func.value
                if method in LEVELS | WITH_LEVEL and re.fullmatch(r"(.*[._])?log", ast.unparse(owner)):
                    yield f"{name}:{node.lineno}", node.args[1 if method in WITH_LEVEL else 0]


# Not computed at import, because every worker of a run imports this module, and one runs its tests.
@cache
def raised() -> list[Message]:
    """Return the message of each error that the library makes."""
    return [*_raised()]


@cache
def logged() -> list[Message]:
    """Return the message of each log call."""
    return [
        Message(place, text, quoted, bare)
        for place, message in log_calls()
        for text, quoted, bare in templates(message)
    ]


def first_word(text: str) -> str:
    """Return the first word in lower case, without a leading article. A value at the beginning gives no word."""
    words: list[str] = re.findall(r"[a-z]+", re.sub(r"\{[^{}]*\}", "{}", text).lower().split(": ")[0])
    if text.startswith(("{", "'", '"', "%")) or not words:
        return ""
    return words[1] if words[0] == "the" and len(words) > 1 else words[0]


def names_its_subject(message: Message) -> bool:
    return first_word(message.text) not in OPENERS


def has_no_riddle(message: Message) -> bool:
    return not RIDDLES.search(re.sub(r"\{[^{}]*\}", "X", message.text))


def begins_in_lower_case(message: Message) -> bool:
    word = re.split(r"[^\w]", message.text)[0]
    return not word[:1].isupper() or word in PROPER or not word[1:].islower()


def is_one_sentence(message: Message) -> bool:
    text = message.text.removesuffix("...")
    return not text.endswith((".", "!", "?", " ")) and not re.search(r"[a-z)][.?!] [A-Z]", text)


def quotes_its_texts(message: Message) -> bool:
    texts = USER_TEXTS.intersection(message.bare)
    return all(value in message.quoted or f"'{{{value}}}'" in message.text for value in texts)


@pytest.mark.parametrize(
    "rule", [names_its_subject, has_no_riddle, begins_in_lower_case, is_one_sentence, quotes_its_texts]
)
def test_an_error_message_has_the_fact_first_and_the_remedy_second(rule: Callable[[Message], bool]) -> None:
    assert len(raised()) > 500
    assert [str(message) for message in raised() if not rule(message)] == []


def test_an_exception_that_users_can_catch_has_a_code() -> None:
    numbered = {kind.__name__ for kind in errors.NUMBERED_ERRORS.values()}
    bases = {"BaseException", "Exception", *numbered}
    found = {
        node.name
        for _, within in modules()
        for node in within
        if isinstance(node, ast.ClassDef) and not bases.isdisjoint(map(ast.unparse, node.bases))
    }
    assert {name for name in found if not name.startswith("_")} - numbered == set()


def is_an_event_with_fields(message: Message) -> bool:
    values = re.findall(r"(\S*)%[-+ #0-9.]*[sdrfgx]", message.text)
    return bool(first_word(message.text)) and all(re.fullmatch(r".*\w=", value) for value in values)


@pytest.mark.parametrize("rule", [names_its_subject, has_no_riddle, begins_in_lower_case, is_one_sentence])
def test_a_log_line_has_the_form_of_a_message(rule: Callable[[Message], bool]) -> None:
    assert len(logged()) > 40
    assert [str(message) for message in logged() if not rule(message)] == []


def test_a_log_line_is_an_event_with_fields() -> None:
    lines = [message for message in logged() if not message.place.startswith(TRANSCRIPTS)]
    assert [str(message) for message in lines if not is_an_event_with_fields(message)] == []


def test_the_message_of_a_log_call_is_written_in_the_call() -> None:
    """Otherwise the tests above would not see it. `LimitedLog` passes the messages of its callers on."""
    hidden = [place for place, message in log_calls() if not [*templates(message)]]
    assert [place for place in hidden if not place.startswith("base/limited_log.py")] == []
