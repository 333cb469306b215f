"""Commands that serve: a signal ends them at any moment."""

from __future__ import annotations

import textwrap

import pytest

from support.processes import run_script

pytestmark = pytest.mark.usefixtures("forks")

#: A script whose children wait for their end, with a signal before each line that runs within.
AT_EACH_LINE = textwrap.dedent(
    """
    import os, signal, sys
    from dissociated.cli.signals import StopSignal

    def child(number):
        lines = 0

        def traced(frame, event, argument):
            nonlocal lines
            if event == "line":
                lines += 1
                if lines == number:
                    os.kill(os.getpid(), signal.SIGTERM)
            return traced

        signal.alarm(10)
        stop = StopSignal()
        sys.settrace(traced)
        came = stop.wait(0.01)
        sys.settrace(None)
        return "it ended" if came else "no such line" if lines < number else "it did not end"

    number, said = 0, "it ended"
    while said == "it ended":
        number += 1
        read, write = os.pipe()
        if not os.fork():
            os.write(write, child(number).encode())
            os._exit(0)
        os.close(write)
        said = os.read(read, 100).decode() or "it hung"
        os.close(read)
    print(number - 1, said)
    """
)


def test_a_signal_at_any_line_of_waiting_for_it_is_seen() -> None:
    run = run_script(AT_EACH_LINE)
    lines, said = run.stdout.strip().split(" ", 1)
    assert said == "no such line"
    assert int(lines) > 1


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_thread_ends_it_as_a_signal_does(when: str) -> None:
    script = f"""
import threading
from dissociated.cli.signals import StopSignal
stop = StopSignal()
assert not stop.wait(0.0)
coming = threading.Thread(target=stop.set)
coming.start()
{"coming.join()" if when == "before" else ""}
assert stop.wait() and stop.wait(0.0)
"""
    assert run_script(script).returncode == 0
