"""A shared library that a transport needs: opening it, and what people are told where it is not the right one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dissociated.errors import TransportError


class Library(NamedTuple):
    """What a library is called, and how people choose another."""

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

    def open(self, ffi: Any, candidates: Iterable[str]) -> tuple[str, Any]:
        """The first of these that is there, and where. Raises TransportError where none is."""
        errors = []
        for candidate in candidates:
            try:
                return candidate, ffi.dlopen(candidate)
            except OSError as error:
                errors.append(str(error))
        raise TransportError(
            f"{self.scheme}: needs {self._stem}, and there is none: {self._extra}, or install {self.name}, "
            f"or let {self.variable} name its {self.file} ({'; '.join(errors)})"
        )

    def no_cffi(self) -> TransportError:
        """There is nothing to open it with."""
        return TransportError(f"{self.scheme}: needs cffi: {self._extra}")

    def wrong(self, path: str) -> TransportError:
        """What was opened is another library."""
        return TransportError(f"{self.scheme}: {path} is no {self._stem}: let {self.variable} name one")

    def check_age(self, path: str, version: str, found: tuple[int, int], oldest: tuple[int, int]) -> None:
        """Raise TransportError where it lacks what we need."""
        if found < oldest:
            raise TransportError(
                f"{self.name} {version} ({path}) is too old: install {'.'.join(map(str, oldest))} or later, "
                f"or {self._extra}"
            )

    def mismatch(self, where: str, theirs: str, ours: str) -> TransportError:
        """The peer has one that this one does not work with."""
        return TransportError(
            f"{where} has {self.name} {theirs} and this process {ours}, which do not work together: install the same "
            f"on both sides, or let {self.variable} name the same {self.file}"
        )
