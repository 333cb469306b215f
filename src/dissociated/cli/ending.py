"""Ctrl-C, SIGTERM and SIGHUP as exceptions, where something is to be done before the process ends."""

from __future__ import annotations

import signal
import sys
from typing import Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """Within the `with` the first of them raises KeyboardInterrupt or SystemExit. For the main thread.

    The others do nothing, so that what is done because of the first is done to its end. SIGQUIT and SIGKILL remain.
    Call `check` now and then: an exception that is raised within a finalizer is lost. What is ignored stays so: `nohup`
    has SIGHUP ignored.
    """

    def __init__(self) -> None:
        found = {number: signal.getsignal(number) for number in _NUMBERS}
        self._before = {number: one for number, one in found.items() if one not in (None, signal.SIG_IGN)}
        self._came: int | None = None  # the first of them

    def __enter__(self) -> Self:
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def catch(self) -> None:
        """Raise from now on."""
        for number in self._before:
            signal.signal(number, self._end)

    def release(self) -> None:
        """Do from now on what was done before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def check(self) -> None:
        """Raise once more if one of them came. For where nothing is done because of it."""
        if self._came is not None:
            self._raise(self._came)

    def _end(self, number: int, _: object) -> None:
        if self._came is None:
            self._came = number
            self._raise(number)

    def _raise(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)
