"""The code on the pages, run as a reader runs it: each page in one namespace, one directory, one shell environment.

Each block has a language. `python` and `sh` are run; of `console` the commands behind "$" are, and what is below them
is what they print in a terminal. `text` is no code. What cannot be run has a comment above it that the reader does not
see: `<!-- not run: WHY -->`, or `<!-- needs torch -->` where a module or a program has to be there.

Only addresses are others than on the page: hosts are this one, ports are free ones, and PORT is that of the catalog
that was started last. A line that serves goes on while the rest of the page is run, and so does a `with` of a server
that waits for Enter.
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
from types import TracebackType
from typing import Any, Self

import dissociated as dis
from processes import Process, forking_command, free_port, in_terminal

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SERVES = re.compile(r"dissociated (node|catalog|serve) ")
_PORT = re.compile(r"(?<=[\w\]]):(4433|4434|8080|8815|8816|8817|13337|31337)\b")
_HOST = re.compile(r"\b((data|catalog)\.example|(?<=//)(here|there)|0\.0\.0\.0|10\.0\.0\.5)(?=[:,\s\"])")
_CHANGING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|in \d+ h \d\d min")  # of what a command prints
_WIDTH = 72  # columns of the terminal in which console blocks were run


@dataclass(frozen=True)
class Block:
    """A block of code, the number of its first line, and what the comment above it says."""

    page: Path
    line: int
    language: str
    code: str
    comment: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """Why it is not run here; None where it is."""
        what, _, why = self.comment.partition(" ")
        if what == "needs" and why and not (importlib.util.find_spec(why) or shutil.which(why)):
            return f"{why} is not installed"
        return why.removeprefix("run: ") if what == "not" else None

    @property
    def is_spark(self) -> bool:
        """Whether it takes a session of Spark."""
        return self.language == "python" and (self.page.stem == "spark" or '.format("dissociated")' in self.code)


def blocks(page: Path) -> list[Block]:
    """All of a page."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], found[3], found[1] or "")
        for found in _BLOCK.finditer(text)
    ]


class Reader:
    """Runs blocks one after another, in `directory`. What they start ends with it: use it as a context manager.

    `given` are the variables that a page takes as the reader's own. Names without a URI are those of `catalog`, which
    is also at the port that pages give to a catalog, until they start one there. `ports` are others that answer.
    Needs the fixture `forks`.
    """

    def __init__(
        self, directory: Path, given: Mapping[str, Any], catalog: str, ports: Mapping[str, int] | None = None
    ) -> None:
        self._namespace: dict[str, Any] = {"__name__": "page", **given, "input": self._serve}
        self._left: deque[Block] = deque()
        self._port = catalog.rpartition(":")[2]
        self._ports = {"8815": int(self._port), **(ports or {})}
        self._stores = 0
        self._paths: dict[str, str] = {}  # of stores: what a page calls them, and where they are
        self._owned = ExitStack()
        self._directory = directory
        tools = directory / "bin"
        tools.mkdir()
        self._owned.enter_context(forking_command(tools / "dissociated"))
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "DISSOCIATED_CATALOG": catalog, "TERM": "dumb"}

    def run(self, some: Iterable[Block]) -> None:
        """Raises what a block raises; its traceback names the page and the line."""
        self._left.extend(block for block in some if not block.not_run)
        self._go_on()

    def _go_on(self) -> None:
        while self._left:
            block = self._left.popleft()
            getattr(self, f"_run_{block.language}")(block)

    def _serve(self, prompt: str) -> str:
        """What a page says is done while its server serves: all that follows."""
        self._use(self._namespace["server"].catalog_uri)
        self._go_on()
        return ""

    def _use(self, uri: str) -> None:
        """PORT on a page stands for the port of the catalog that was started last."""
        self._port = uri.rpartition(":")[2]

    def _adapted(self, text: str) -> str:
        def port(found: re.Match[str]) -> str:
            return f":{self._ports.setdefault(found[1], free_port())}"

        for written, path in self._paths.items():
            text = text.replace(written, path)
        return _PORT.sub(port, _HOST.sub("127.0.0.1", text)).replace(":PORT", f":{self._port}")

    def _run_text(self, block: Block) -> None: ...

    def _run_python(self, block: Block) -> None:
        source = "\n" * (block.line - 1) + self._adapted(block.code)  # lines have the numbers of the page
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
        """A command that serves, at ports of its own and with a store of its own: others of the page go on."""
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
    """The commands of a console block, each with what is below it."""
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
