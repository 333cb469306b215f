"""Read damaged files in every way, in a separate process with little memory.

Usage: `python -m golden.damaged < LINES`. Each line is a way, a tab and a path; the lines of a way are adjacent. The
process prints a line when it begins to read a file, and another one with the result. A read that takes too long ends
the process with its traceback, so a read that began and did not end is at fault.
"""

from __future__ import annotations

import faulthandler
import logging
import resource
import sys
import threading
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

import dissociated as dis
from dissociated.errors import DissociatedError

from .ways import WAYS, Read, server

MEMORY = 1 << 32  # bytes that the process may map
#: A live stream in shared memory reserves 64 GiB of address space, in the server and in the client.
MORE_MEMORY = {"live-shm-any": 1 << 38}
DEADLINE = 20.0  # seconds to read a file in a single way

GOOD = pa.table({"n": [1, None, 3], "s": ["a", "b", None]})


class Complaints(logging.Handler):
    """A handler of the server's error records, which are its own faults. Damaged sources only cause warnings."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.getMessage()} {record.exc_info}")


def end_of(read: Read, running: dis.Server, path: Path) -> str:
    """Return the result of reading a file: valid, invalid, or the exception.

    Readers do not check the contents of buffers. A failing `validate`, which does, is therefore an acceptable result.
    """
    try:
        arrived = read(running, path)
    except DissociatedError as error:
        return f"refused: {type(error).__name__}"
    except Exception as error:
        return f"other: {error!r}"
    try:
        for batch, _ in arrived.batches:
            batch.validate(full=True)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        return "not valid"
    return "valid"


def harmed(running: dis.Server) -> list[str]:
    """Return the locations at which a good dataset cannot be read any more."""
    running.publish("good", GOOD)
    uris = running.locations("good")
    return [uri for uri in uris if dis.open_stream(uri, running.ticket("good"), allow_rma=True).read_all() != GOOD]


def main() -> None:
    faulthandler.enable()
    asked = [line.split("\t") for line in sys.stdin.read().splitlines()]
    ways = [*dict.fromkeys(way for way, _ in asked)]
    memory = max(MORE_MEMORY.get(way, MEMORY) for way in ways)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    complaints = Complaints()
    logging.getLogger("dissociated").addHandler(complaints)
    with server(ways) as running:
        for way, some in groupby(asked, key=itemgetter(0)):
            for _, path in some:
                print("begin", way, path, sep="\t", flush=True)
                faulthandler.dump_traceback_later(DEADLINE, exit=True)
                end = end_of(WAYS[way], running, Path(path))
                faulthandler.cancel_dump_traceback_later()
                if complaints.said:
                    end = f"other: logged {complaints.said.pop()}"
                print("end", way, path, end, sep="\t", flush=True)
            for uri in harmed(running):
                print("end", way, uri, "other: not served any more", sep="\t", flush=True)
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        thread.join(DEADLINE)  # the thread may be about to end
        if thread.is_alive():
            print("end", ways, thread.name, "other: a thread is left", sep="\t", flush=True)


if __name__ == "__main__":
    main()
