"""Values that are created on first use: they are created once, also if several threads come first."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dissociated.base.once import once
from support.helpers import PATIENCE

THREADS = 4


def test_callers_that_come_while_a_result_is_made_get_the_same_result() -> None:
    coming = threading.Barrier(THREADS)
    begun, made = threading.Event(), []

    @once
    def thing(name: str) -> object:
        begun.set()
        # No other thread may begin, so this wait times out: it gives the other threads time to try.
        threading.Event().wait(0.05)
        made.append(name)
        return object()

    def ask(name: str) -> object:
        coming.wait(PATIENCE)
        return thing(name)

    with ThreadPoolExecutor(THREADS) as pool:
        things = set(pool.map(ask, ["a"] * THREADS))
    assert begun.is_set()
    assert (len(things), made) == (1, ["a"])
    assert thing("b") not in things


def test_what_fails_is_tried_again() -> None:
    tries = []

    @once
    def thing() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("not yet")
        return len(tries)

    with pytest.raises(OSError, match="not yet"):
        thing()
    assert thing() == thing() == 2


def test_a_process_that_is_forked_meanwhile_does_not_wait_for_the_parents_thread() -> None:
    """The test runs in a separate process, whose child would hang."""
    script = """
        import os, threading
        from dissociated.base.once import once

        begun, go_on = threading.Event(), threading.Event()

        @once
        def thing():
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                go_on.wait()
            return 7

        thread = threading.Thread(target=thing)
        thread.start()
        begun.wait()
        child = os.fork()
        if not child:
            os._exit(thing())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        go_on.set()
        thread.join()
        raise SystemExit(0 if code == 7 else 1)
        """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=PATIENCE).returncode == 0


#: Threads that all use UCX and libfabric for the first time at once, as servers and clients.
FIRST_USE = """
    import sys, threading
    from concurrent.futures import ThreadPoolExecutor
    import pyarrow as pa
    import dissociated as dis

    coming = threading.Barrier(8)

    def use(where):
        coming.wait()
        with dis.Server([where], catalog=None) as server:
            server.publish("one", pa.table({"n": [1, 2, 3]}))
            read = dis.open_stream(server.locations("one")[0], server.ticket("one")).read_all()
            assert read["n"].to_pylist() == [1, 2, 3]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, ["ucx:", "fabric:"] * 4))
    """


@pytest.mark.needs("ucx", "libfabric")
def test_threads_that_use_ucx_and_libfabric_first_find_one_library_each() -> None:
    """A fresh process is needed. With two copies of a library, cffi raises or the process dies, 70 times of 70."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIRST_USE)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert (run.returncode, run.stderr) == (0, "")
