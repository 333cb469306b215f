"""Ctrl-C, SIGTERM and SIGHUP as exceptions, once, where something is to be done before the process ends."""

from __future__ import annotations

import signal
import sys
from typing import Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """Within the `with` the first of them raises KeyboardInterrupt or SystemExit. For the main thread.

    The others do nothing, so that what is done because of the first is done to its end. SIGQUIT and SIGKILL remain.
    What is ignored stays so: `nohup` has SIGHUP ignored.
    """

    def __init__(self) -> None:
        found = {number: signal.getsignal(number) for number in _NUMBERS}
        self._before = {number: one for number, one in found.items() if one not in (None, signal.SIG_IGN)}
        self._came = False  # one of them

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

    def _end(self, number: int, _: object) -> None:
        if self._came:
            return
        self._came = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)
