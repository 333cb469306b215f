"""Counted outcomes of random input."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa

from dissociated import errors
from dissociated.errors import DissociatedError

DOCUMENTED = {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def changed(data: bytes, random: random.Random) -> bytes:
    if not data:
        return data
    mutated = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(mutated))
        if random.random() < 0.5:
            mutated[at] ^= 1 << random.randrange(8)
        else:
            few = random.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff" * 8))
            mutated[at : at + len(few)] = few[: len(mutated) - at]
    return bytes(mutated)


class Outcomes:
    """The number and the first example of each outcome."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, name: str, example: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        self.examples.setdefault(name, example)

    def validate(self, table: pa.Table) -> None:
        """Validate batches before their values are touched, because a peer chooses the content of bodies."""
        try:
            table.validate(full=True)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            self.add("not valid", str(error))

    def unexpected(self) -> dict[str, str]:
        """Return an example of each outcome that is neither success nor a documented error."""
        allowed = {"read", "not valid"} | {f"ours: {name}" for name in DOCUMENTED}
        return {name: example for name, example in self.examples.items() if name not in allowed and name[:5] != "told:"}

    def attempt(self, number: int, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except DissociatedError as error:
            self.add(f"ours: {type(error).__name__}", f"{number}: {error}")
        except Exception as error:
            names = ", ".join(kind.__name__ for kind in type(error).__mro__[:3])
            self.add(f"other: {names}", f"{number}: {error!r}")
        else:
            self.add("read", str(number))
