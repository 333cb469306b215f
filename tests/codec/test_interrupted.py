"""Ctrl-C at any line of a reader: later results are correct, or the reader reports that it cannot continue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import pyarrow as pa
import pytest

from dissociated.codec import join, reader, runs
from dissociated.codec.batches import BatchReader
from dissociated.errors import DissociatedError
from support.helpers import case

from .test_join import encoded
from .test_runs import one, read, together

ROWS = [pa.record_batch({"n": [n]}) for n in range(40)]
SCHEMA, *MESSAGES = encoded(*ROWS)
MODULES = (join.__file__, runs.__file__, reader.__file__)
#: A line followed only by C code, which handles no signal.
UNINTERRUPTED = reader.Reading.take.__code__, "return item"

#: Readers of these rows: from messages, from a run, which bypasses the file that libarrow reads, and from batches.
READERS: dict[str, Callable[[], pa.RecordBatchReader]] = {
    "messages": lambda: read(one(SCHEMA), *map(one, MESSAGES)),
    "a run": lambda: read(one(SCHEMA), together(MESSAGES)),
    "batches": lambda: BatchReader(ROWS[0].schema, ((batch, None) for batch in ROWS)),
}


class Interruption:
    """A trace function that raises KeyboardInterrupt before the line number `at` that runs in `MODULES`."""

    def __init__(self, at: int) -> None:
        self.left = at
        self._last = dict([_line(*UNINTERRUPTED)])

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line" and self._last.get(frame.f_code) != frame.f_lineno:
            if not self.left:
                self.left = -1
                raise KeyboardInterrupt
            self.left -= 1
        return self


def _line(code: CodeType, text: str) -> tuple[CodeType, int]:
    with open(code.co_filename) as source:
        lines = source.read().splitlines()
    (number,) = [n for n in range(code.co_firstlineno, code.co_firstlineno + 40) if lines[n - 1].strip() == text]
    return code, number


@pytest.mark.parametrize("open_reader", READERS.values(), ids=READERS.keys())
def test_an_interrupted_reader_never_looks_complete(open_reader: Callable[[], pa.RecordBatchReader]) -> None:
    tracing = sys.gettrace()
    at, goes_on, fails = 0, 0, 0
    while True:
        opened = open_reader()
        interruption = Interruption(at)
        got: list[int] = []
        ended = False
        with case(at):
            while not ended and len(got) < 50:
                sys.settrace(interruption if interruption.left >= 0 else tracing)
                try:
                    got += opened.read_next_batch()["n"].to_pylist()
                except KeyboardInterrupt:
                    continue
                except StopIteration:
                    ended = True
                except DissociatedError:
                    break
                finally:
                    sys.settrace(tracing)
            assert got == [*range(len(got))], "none is left out, none comes twice"
            assert not ended or len(got) == 40, "the end is the end"
        if interruption.left >= 0:
            break
        goes_on, fails, at = goes_on + ended, fails + (not ended), at + (1 if at < 150 else 17)
    assert goes_on
    assert fails
