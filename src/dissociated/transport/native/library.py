"""Shared libraries that transports open with cffi: how to find and open them, and errors for unusable ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.errors import TransportError

T = TypeVar("T")


class Library(NamedTuple):
    """A shared library that a transport needs, and the environment variable that selects another file."""

    scheme: str  # of the transport; also the name of the extra that pip installs
    name: str
    file: str
    variable: str  # the environment variable that holds the path of another file

    @property
    def _extra(self) -> str:
        return f"pip install 'dissociated[{self.scheme}]'"

    @property
    def _stem(self) -> str:
        return self.file.partition(".")[0]

    def open(self, ffi: Any, installed: Path | None) -> tuple[str, Any]:
        """Open the library that the environment variable names, or else the one that pip installed.

        The system's library is not searched for. Otherwise two hosts, or a test run and its user, could use different
        versions by accident, and different versions do not work together.

        Args:
            ffi: The cffi interface with the definitions of the library.
            installed: The file that pip installed, or None.

        Returns:
            The path, and the library.

        Raises:
            TransportError: The library is not installed, or cannot be opened.
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

    def load(self, kind: Callable[[], T]) -> T:
        """Return the result of `kind`, which opens the library with cffi.

        Raises:
            TransportError: cffi is missing, or the library cannot be used.
        """
        try:
            return kind()
        except ImportError:
            raise TransportError(f"{self.scheme}: needs cffi: {self._extra}") from None

    def wrong(self, path: str) -> TransportError:
        """Return the error for the file at `path`, which is a different library."""
        return TransportError(f"{self.scheme}: {path!r} is not {self._stem}: set {self.variable} to the path of one")

    def check_age(self, path: str, version: str, numbers: tuple[int, int], oldest: tuple[int, int]) -> None:
        """Raise `TransportError` if the library is older than `oldest`."""
        if numbers < oldest:
            raise TransportError(
                f"{self.name} {version} ({path!r}) is too old: install {'.'.join(map(str, oldest))} or later, or "
                f"{self._extra}"
            )

    def mismatch(self, server: str, server_version: str, version: str) -> TransportError:
        """Return the error for a peer whose version is incompatible with the version of this process."""
        return TransportError(
            f"{server} has {self.name} {server_version}, and this process {version}, which do not work together: "
            f"install the same version on both sides, or let {self.variable} name the same {self.file}"
        )


def view_of(ffi: Any, data: Buffer) -> Any:
    """Return a cffi view of `data`. The view keeps `data` alive.

    A memoryview is wrapped in an Arrow buffer. Otherwise CPython's garbage collector may clear a memoryview of a
    reference cycle while cffi still has a view of it, and the process crashes when that view is released.
    """
    return ffi.from_buffer(pa.py_buffer(data) if isinstance(data, memoryview) else data)
