"""The shield against Ctrl-C: it is held back in a critical section, and takes effect right after."""

from __future__ import annotations

import ctypes
import select
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from os import close, eventfd, eventfd_write

import pytest

from dissociated.base.interrupts import error_code_callback, interrupts_held
from support.helpers import PATIENCE


def test_ctrl_c_takes_effect_after_the_outermost_section() -> None:
    steps = []

    def nested() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
            steps.append("rest of the outer section")
        steps.append("after it")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert steps == ["rest of the outer section"]


def test_an_error_in_the_section_is_the_context_of_the_interrupt() -> None:
    def failing() -> None:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the section failed")

    with pytest.raises(KeyboardInterrupt) as raised:
        failing()
    assert isinstance(raised.value.__context__, ValueError)


def test_the_handler_of_the_program_is_called_and_stays() -> None:
    calls: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
        assert calls == [signal.SIGINT] * 2
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ctrl_c_ends_a_wait_in_the_section_at_once() -> None:
    waker = eventfd(0)
    main = threading.main_thread().ident
    assert main is not None
    poll = select.poll()
    poll.register(waker, select.POLLIN)
    ready: list[tuple[int, int]] = []

    def waiting() -> None:
        with interrupts_held(lambda: eventfd_write(waker, 1)):
            pool.submit(signal.pthread_kill, main, signal.SIGINT)
            ready.extend(poll.poll(PATIENCE * 1000))

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        waiting()
    assert ready, "nothing ended the wait"
    close(waker)


def test_another_thread_needs_no_shield() -> None:
    def section() -> str:
        with interrupts_held():
            return "done"

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(section).result(PATIENCE) == "done"


class Items(ctypes.c_void_p):
    """The object that C passes as a pointer: it has an item at 1, and Ctrl-C comes when item 2 is looked up."""

    def __getitem__(self, key: int) -> None:
        if key == 2:
            signal.raise_signal(signal.SIGINT)
        if key != 1:
            raise KeyError(key)


def test_a_callback_returns_the_error_code_for_every_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", id)  # From 3.13 on, exceptions in such a callback are reported.
    callback = ctypes.CFUNCTYPE(ctypes.c_int, Items, ctypes.c_int)(error_code_callback(5))
    assert [callback(Items(), key) for key in (1, 2, 3)] == [0, 5, 5]
