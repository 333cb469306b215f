"""A runner for the code on the documentation pages and in docstrings.

Each page has one namespace, one directory and one shell environment.

The language of a block decides how it runs. Blocks of `python` and `sh` are executed. In a `console` block, the
commands behind "$" are executed, and the lines below each command are its expected output in a terminal. A `text` block
is not code. A block that cannot run has a comment above it that readers do not see: `<!-- not run: WHY -->`, or `<!--
needs torch -->` for a required module or program.

Only addresses are changed: hosts become this host, ports become free ports, and PORT becomes the port of the catalog
that started last. A command that serves keeps running while the rest of the page runs, and so does a `with` block of a
server that waits for Enter.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import Any, NamedTuple, Self

import dissociated as dis
from support.processes import Process, forking_command, free_port, in_terminal

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCE = ROOT / "src" / "dissociated"
_EXAMPLE = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^(?:<!-- (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVES = re.compile(r"dissociated (node|catalog|serve) ")
_PORT = re.compile(r"(?<=[\w\]]):(4433|4434|8080|8815|8816|8817|13337|31337)\b")
_HOST = re.compile(r"\b((data|catalog)\.example|(?<=//)(here|there)|0\.0\.0\.0|10\.0\.0\.5)(?=[:,\s\"])")
_CHANGING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|in \d+ h \d\d min")  # parts of output that change
_WIDTH = 72  # columns of the terminal for console blocks


@dataclass(frozen=True)
class Block:
    """A block of code, the number of its first line, and the content of the comment above it."""

    page: Path
    line: int
    language: str
    code: str
    comment: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """Return the reason why the block cannot run here, or None."""
        what, _, why = self.comment.partition(" ")
        if what == "needs" and why and not (importlib.util.find_spec(why) or shutil.which(why)):
            return f"{why} is not installed"
        return why.removeprefix("run: ") if what == "not" else None

    @property
    def is_spark(self) -> bool:
        """Return whether the block needs a Spark session."""
        uses = '.format("dissociated")' in self.code or "from dissociated.spark " in self.code
        return self.language == "python" and (self.page.stem == "spark" or uses)


def blocks(page: Path) -> list[Block]:
    """Return all blocks of a page."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], found[3], found[1] or "")
        for found in _BLOCK.finditer(text)
    ]


class Example(NamedTuple):
    """The example in a docstring of the library, and the dotted name of its owner in the module."""

    owner: str
    block: Block

    def __str__(self) -> str:
        return f"{self.block.page.relative_to(SOURCE).with_suffix('')}.{self.owner}"


def examples() -> Iterator[Example]:
    """Yield all examples in docstrings of the library."""

    def walk(page: Path, nodes: Iterable[ast.stmt], within: str) -> Iterator[Example]:
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                owner = f"{within}{node.name}"
                for found in _EXAMPLE.finditer(ast.get_docstring(node) or ""):
                    needs = _needs(page)
                    line = node.body[0].lineno + found.string.count("\n", 0, found.start(1))
                    yield Example(owner, Block(page, line, "python", dedent(found[1]), needs))
                yield from walk(page, node.body, f"{owner}.")

    for page in sorted(SOURCE.rglob("*.py")):
        source = page.read_text()
        if _EXAMPLE.search(source):  # parsing all modules takes seconds
            yield from walk(page, ast.parse(source).body, "")


def _needs(page: Path) -> str:
    """Return the comment about the module that the examples of a file of the library need, which its room implies."""
    match page.parent.name:
        case "torch":
            return "needs torch"
        case "adapters" if page.stem == "ray":
            return "not run: it would start a cluster of Ray; tests/adapters has one"
        case "adapters":
            return f"needs {'datasets' if page.stem == 'huggingface' else page.stem}"
    return ""


class Reader:
    """A context manager that runs blocks one after another in `directory`, and stops everything they start.

    `given` are variables that a page expects the reader to have. Names without a URI refer to `catalog`, which also
    stands for the catalog port on the pages until a page starts a catalog there. `ports` maps other ports of the pages
    to real ones. The test must use the fixture `forks`.
    """

    def __init__(
        self, directory: Path, given: Mapping[str, Any], catalog: str, ports: Mapping[str, int] | None = None
    ) -> None:
        self._namespace: dict[str, Any] = {"__name__": "page", **given, "input": self._serve}
        self._left: deque[Block] = deque()
        self._port = catalog.rpartition(":")[2]
        self._ports = {"8815": int(self._port), **(ports or {})}
        self._stores = 0
        self._paths: dict[str, str] = {}  # paths of stores on the page, and their real paths
        self._owned = ExitStack()
        self._directory = directory
        tools = directory / "bin"
        tools.mkdir()
        self._owned.enter_context(forking_command(tools / "dissociated"))
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "DISSOCIATED_CATALOG": catalog, "TERM": "dumb"}

    def run(self, some: Iterable[Block]) -> None:
        """Run blocks. Tracebacks name the page and the line."""
        self._left.extend(block for block in some if not block.not_run)
        self._go_on()

    def _go_on(self) -> None:
        while self._left:
            block = self._left.popleft()
            getattr(self, f"_run_{block.language}")(block)

    def _serve(self, prompt: str) -> str:
        """Run the remaining blocks while the page's server serves: `input` on a page calls this."""
        self._use(self._namespace["server"].catalog_uri)
        self._go_on()
        return ""

    def _use(self, uri: str) -> None:
        """Let PORT stand for the port of `uri`, the catalog that started last."""
        self._port = uri.rpartition(":")[2]

    def _adapted(self, text: str) -> str:
        def port(found: re.Match[str]) -> str:
            return f":{self._ports.setdefault(found[1], free_port())}"

        for written, path in self._paths.items():
            text = text.replace(written, path)
        return _PORT.sub(port, _HOST.sub("127.0.0.1", text)).replace(":PORT", f":{self._port}")

    def _run_text(self, block: Block) -> None: ...

    def _run_python(self, block: Block) -> None:
        source = "\n" * (block.line - 1) + self._adapted(block.code)  # Keep the page's line numbers.
        code = compile(source, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, self._namespace))
        else:
            exec(code, self._namespace)

    def _run_sh(self, block: Block) -> None:
        script: list[str] = []
        for line in block.code.replace("\\\n", " ").splitlines():
            if found := _SERVES.match(line):
                self._shell(block, script)
                script = []
                self._start(found[1], line)
            else:
                script.append(self._adapted(line))
        self._shell(block, script)

    def _start(self, command: str, line: str) -> None:
        """Start a command that serves, with its own ports and store: earlier commands of the page keep running."""
        upstream = re.search(r"--catalog (\S+)", line) if command == "node" else None
        kept = {} if upstream is None else {port: self._ports[port] for port in _PORT.findall(upstream[1])}
        self._ports = {port: at for port, at in self._ports.items() if f":{port}" not in line or port in kept}
        self._stores += 1
        place = {"node": "--store", "catalog": "--db"}.get(command)
        arguments = shlex.split(self._adapted(line), comments=True)[1:]
        path = str(self._directory / f"{place}-{self._stores}")
        arguments += [place, path] if place else []
        if store := re.search(r"--store (\S+)", line):
            self._paths[store[1]] = path
        process = Process(*arguments, cwd=self._directory, forked=True)
        self._owned.callback(process.kill)
        self._use(process.uri)

    def _shell(self, block: Block, script: list[str]) -> None:
        if not any(map(str.strip, script)):
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", "\n".join(script)],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{block}: {script}\n{done.stdout}"

    def _run_console(self, block: Block) -> None:
        for command, wanted in _commands(block.code):
            adapted = ["bash", "-euo", "pipefail", "-c", self._adapted(command)]
            said = in_terminal(_WIDTH, adapted, self._environment, self._directory).replace("\r\n", "\n")
            wanted, said = (_CHANGING.sub("TIME", one) for one in (wanted, said))
            assert doctest.OutputChecker().check_output(wanted, said, doctest.ELLIPSIS), f"{block}: {command}\n{said}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._namespace.values():
            if isinstance(one, dis.Server | dis.Client | socket.socket):
                self._owned.callback(one.close)
        self._namespace.clear()
        self._owned.close()


def _commands(code: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a console block, each with its expected output."""
    lines = deque(code.splitlines())
    while lines:
        command = lines.popleft().removeprefix("$ ")
        while not _is_whole(command):
            command += f"\n{lines.popleft()}"
        wanted = ""
        while lines and not lines[0].startswith("$ "):
            wanted += f"{lines.popleft()}\n"
        yield command, wanted


def _is_whole(command: str) -> bool:
    with suppress(ValueError):
        shlex.split(command)
        return True
    return False
