"""Ctrl-C at any line of a reader: later results are correct, or the reader reports that it cannot continue."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pyarrow as pa
import pytest

from dissociated.codec import join, reader, runs
from dissociated.codec.batches import BatchReader
from dissociated.errors import DissociatedError
from support.helpers import PATIENCE, case

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


class Meeting:
    """A trace function that lets another thread read before the line number `at` of codec/reader.py that runs."""

    def __init__(self, at: int, other: threading.Thread, other_is_done: threading.Event) -> None:
        self.left = at
        self._other = other
        self._other_is_done = other_is_done

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != reader.__file__:
            return None
        if event == "line":
            if not self.left:
                self._other.start()
                assert self._other_is_done.wait(PATIENCE)
            self.left -= 1
        return self


def test_of_two_threads_that_read_at_once_one_gets_an_error_of_ours() -> None:
    """The other thread arrives at any line, and is then reading from the source, or was refused."""
    tracing = sys.gettrace()
    at, refused = 0, 0
    while True:
        reads_or_refused, goes_on = threading.Event(), threading.Event()

        def source(reads: threading.Event = reads_or_refused, goes_on: threading.Event = goes_on) -> Iterator[Any]:
            for batch in ROWS[:3]:
                if threading.current_thread() is not threading.main_thread():
                    reads.set()
                    assert goes_on.wait(PATIENCE)
                yield batch, None

        opened = BatchReader(ROWS[0].schema, source())
        numbers: list[int] = []
        errors: list[DissociatedError] = []

        def read_one(
            opened: BatchReader = opened,
            numbers: list[int] = numbers,
            errors: list[DissociatedError] = errors,
            done: threading.Event = reads_or_refused,
        ) -> None:
            try:
                numbers.append(opened.read_next_batch()["n"][0].as_py())
            except DissociatedError as error:
                errors.append(error)
            done.set()

        other = threading.Thread(target=read_one)
        meeting = Meeting(at, other, reads_or_refused)
        sys.settrace(meeting)
        try:
            read_one(done=threading.Event())
        finally:
            sys.settrace(tracing)
            goes_on.set()
        if meeting.left >= 0:
            break
        other.join()
        with case(at):
            assert len(numbers) + len(errors) == 2
            assert len(errors) <= 1
            assert sorted([*numbers, *(batch["n"][0].as_py() for batch in opened)]) == [0, 1, 2]
        at, refused = at + 1, refused + len(errors)
    assert refused
