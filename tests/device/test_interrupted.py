"""Ctrl-C while C code asks us for batches, or we ask C code: an incomplete stream never looks complete."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from dissociated.codec import cdevice
from dissociated.codec.device import DeviceReader, to_device
from dissociated.datasets.device import as_device_dataset
from dissociated.errors import SourceError
from dissociated.memory.device.base import Device
from support.helpers import case

from . import consumer

#: Not in these functions, which free memory: Python drops Ctrl-C there. That can leak memory, but loses no rows.
RELEASES = ("__del__", "_release", "_release_array", "_release_stream", "destroy")
ROWS = [pa.record_batch({"n": [n]}) for n in range(4)]


def reader_of(device: Device) -> DeviceReader:
    return to_device(pa.RecordBatchReader.from_batches(ROWS[0].schema, ROWS), device)


class Interruption:
    """A tracer that raises KeyboardInterrupt at the start of function or line number `at` of `cdevice`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != cdevice.__file__ or frame.f_code.co_name in RELEASES:
            return None
        if event in ("call", "line"):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self

    @contextmanager
    def awaited(self) -> Iterator[None]:
        tracing = sys.gettrace()
        sys.settrace(self if self.left >= 0 else tracing)
        try:
            yield
        finally:
            sys.settrace(tracing)


def test_a_consumer_in_c_never_sees_the_end_too_early(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    # From 3.13 on, PyMapping_HasKey reports the exceptions that it has caught.
    monkeypatch.setattr(sys, "unraisablehook", id)
    whole = 0
    for at in itertools.count():
        stream = consumer.TakenStream(reader_of(device))
        interruption = Interruption(at)
        rows = failures = 0
        ended = False
        while not ended and failures < 3:
            try:
                with interruption.awaited():
                    struct = stream.next()
            except OSError:
                failures += 1
                continue
            if struct is None:
                ended = True
                continue
            with case(f"interrupted at {at}"):
                consumer.same(device, struct, ROWS[rows])
            rows += 1
            struct.array.release(ctypes.addressof(struct))
        assert rows == len(ROWS) or not ended, f"the end came after {rows} rows, interrupted at {at}"
        whole += ended
        if interruption.left >= 0:
            break
        assert failures, f"interrupted at {at}"
    assert whole < at


def test_an_interrupted_put_is_not_published(device: Device) -> None:
    for at in itertools.count():
        interruption = Interruption(at)
        source = reader_of(device)
        try:
            with interruption.awaited():
                dataset = as_device_dataset("x", source)
        except KeyboardInterrupt:
            continue
        assert dataset is not None
        assert dataset.open_reader().read_all() == pa.Table.from_batches(ROWS)
        assert interruption.left >= 0, "it was not interrupted"
        break
    assert at > 4


class Untouched:
    """A foreign stream whose ctypes callback was interrupted: it has done nothing, and returns 0."""

    def __init__(self, reader: DeviceReader) -> None:
        self._capsule = reader.__arrow_c_device_stream__()
        address = cdevice.pointer(self._capsule, b"arrow_device_array_stream")
        self._next = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda stream, out: 0)
        ctypes.c_void_p.from_address(address + 16).value = ctypes.cast(self._next, ctypes.c_void_p).value

    def __arrow_c_device_stream__(self, requested_schema: object = None, **options: object) -> object:
        return self._capsule


def test_a_producer_that_has_done_nothing_has_not_ended(device: Device) -> None:
    with pytest.raises(SourceError, match="neither a batch nor its end"):
        as_device_dataset("x", Untouched(reader_of(device)))
