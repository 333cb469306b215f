"""What connections share whose medium has messages of its own. The real ones are in test_connections.py."""

from __future__ import annotations

import select
from contextlib import closing
from typing import Any, NamedTuple

from dissociated.message import Message
from dissociated.transport.base import Allocate
from dissociated.transport.native import NativeConnection


class Outgoing(NamedTuple):
    """A message, prepared."""

    size: int


class Quiet(NativeConnection):
    """Sends without ever saying that something happened, as UCX may when its own thread did the work."""

    def __init__(self) -> None:
        super().__init__("nobody", accepted=False)
        self.looks = 0

    def prepare(self, messages: Any) -> Any:
        return [Outgoing(sum(map(len, message.parts))) for message in messages]

    def _progress(self) -> bool:
        return False

    def _arm(self) -> bool:
        return True

    def _sleep(self, seconds: float) -> None:
        select.select([self._waker.descriptor], [], [], min(seconds, 0.01))

    def _start(self, message: Any) -> None:
        self._posted("request", message.size, message)

    def _complete(self, request: Any) -> bool:
        self.looks += 1
        return self.looks > 2

    def _waiting(self) -> bool:
        return False

    def _take(self, allocate: Allocate) -> bool:
        return False

    def _tell(self, reason: str) -> bool:
        return False

    def _release(self) -> None:
        pass


def test_what_completes_unnoticed_is_noticed() -> None:
    with closing(Quiet()) as connection:
        connection.send([Message(1, (b"body",))], 0.5)
        assert connection.looks == 3
