"""SIGTERM and SIGHUP as exceptions, where something is to be done before the process ends."""

from __future__ import annotations

import signal
import sys
from typing import Self

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """Within the `with` they raise SystemExit, as Ctrl-C raises KeyboardInterrupt. For the main thread.

    What is ignored stays so: `nohup` has SIGHUP ignored.
    """

    def __init__(self) -> None:
        found = {number: signal.getsignal(number) for number in _NUMBERS}
        self._before = {number: one for number, one in found.items() if one not in (None, signal.SIG_IGN)}

    def __enter__(self) -> Self:
        self.catch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def catch(self) -> None:
        """Raise from now on."""
        for number in self._before:
            signal.signal(number, _end)

    def release(self) -> None:
        """Do from now on what was done before."""
        for number, before in self._before.items():
            signal.signal(number, before)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)
