"""A shared library that a transport needs, and its memory, by way of cffi: opening it, and why it cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import TransportError


class Library(NamedTuple):
    """The names of a library, and how users choose another one."""

    scheme: str  # of the transport, which is also the extra that pip installs
    name: str
    file: str
    variable: str  # of the environment, which names the file of another one

    @property
    def _extra(self) -> str:
        return f"pip install 'dissociated[{self.scheme}]'"

    @property
    def _stem(self) -> str:
        return self.file.partition(".")[0]

    def open(self, ffi: Any, installed: Path | None) -> tuple[str, Any]:
        """Open the library that the environment variable names, or else the one that pip installed.

        The system's library is never found by itself: two hosts, or a test run and its user, would have different
        ones by accident, and libraries of different versions do not work together.

        Args:
            ffi: cffi's.
            installed: the file that pip put there, if it is installed.

        Returns:
            The path, and the library.

        Raises:
            TransportError: if there is none, or it cannot be opened.
        """
        chosen = os.environ.get(self.variable)
        path = chosen or (str(installed) if installed is not None else None)
        if path is None:
            raise TransportError(
                f"{self.scheme}: {self._stem} is not installed: {self._extra}, or install {self.name} and let "
                f"{self.variable} name its {self.file}"
            )
        try:
            return path, ffi.dlopen(path)
        except OSError as error:
            remedy = f"let {self.variable} name a {self.file}, or unset it" if chosen else self._extra
            raise TransportError(f"{self.scheme}: {self._stem} cannot be opened ({error}): {remedy}") from None

    def no_cffi(self) -> TransportError:
        """Return the error for a missing cffi, which opens libraries."""
        return TransportError(f"{self.scheme}: needs cffi: {self._extra}")

    def wrong(self, path: str) -> TransportError:
        """Return the error for a file that is another library."""
        return TransportError(f"{self.scheme}: {path} is no {self._stem}: let {self.variable} name one")

    def check_age(self, path: str, version: str, found: tuple[int, int], oldest: tuple[int, int]) -> None:
        """Raise `TransportError` if the library is older than `oldest`."""
        if found < oldest:
            raise TransportError(
                f"{self.name} {version} ({path}) is too old: install {'.'.join(map(str, oldest))} or later, "
                f"or {self._extra}"
            )

    def mismatch(self, where: str, theirs: str, ours: str) -> TransportError:
        """Return the error for a peer whose version does not work with this one."""
        return TransportError(
            f"{where} has {self.name} {theirs} and this process {ours}, which do not work together: install the same "
            f"on both sides, or let {self.variable} name the same {self.file}"
        )


def view_of(ffi: Any, data: Buffer) -> Any:
    """cffi's view of a buffer, which it keeps.

    Arrow holds a memoryview for it. Where CPython finds one in a cycle that is garbage, it clears it although cffi has
    a view of it, and the process ends as that is given back.
    """
    return ffi.from_buffer(pa.py_buffer(data) if isinstance(data, memoryview) else data)
