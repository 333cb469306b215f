"""Decode the damaged files that the Arrow project's fuzzers found.

Usage: `python decode_damaged.py ARROW_TEST_DATA`. It runs in a process of its own, which may crash or run out of
memory. It prints a line for each file and way of feeding: the name, and "decoded" or the exception.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
from pathlib import Path

from dissociated.ipc import CollectListener, StreamDecoder

MEMORY = 4 << 30  # bytes that the process may map


def outcome(content: bytes, size: int) -> str:
    decoder = StreamDecoder(CollectListener())
    try:
        for at in range(0, len(content), size):
            decoder.consume(content[at : at + size])
        decoder.finish()
    except BaseException as error:
        return type(error).__name__
    return "decoded"


def main() -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    root = Path(sys.argv[1])
    for path in sorted([*root.glob("arrow-ipc-stream/*"), *root.glob("arrow-ipc-file/*")]):
        if path.is_file():
            content = path.read_bytes()
            for size in (1 << 30, 1):
                print(f"{path.name}/{size}", outcome(content, size))


if __name__ == "__main__":
    main()
