"""The speed of process_vm_readv, by which UCX with err_mode=none copies bodies between processes of one host."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import time
from multiprocessing.connection import Connection

from benchmarks.rounds import in_turns

_CONTEXT = multiprocessing.get_context("spawn")
_STEP = 1 << 20  # bytes
_MANY = 256  # steps, together larger than the processor's caches


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copying(rounds: int) -> dict[str, float]:
    """Measure the GB/s of process_vm_readv in calls of 1 MB.

    Returns:
        The median rate of copying the same MB again and again, which stays in the caches, and of copying 256 MB.
    """
    ours, theirs = _CONTEXT.Pipe()
    owner = _CONTEXT.Process(target=_own, args=(theirs,), daemon=True)
    owner.start()
    try:
        source, memory = ours.recv(), _memory()
        into = _address(memory)
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        read.restype = ctypes.c_ssize_t

        def rate(steps: int) -> float:
            started = time.perf_counter()
            for step in range(_MANY):
                at = step % steps * _STEP
                local, remote = _Iovec(into + at, _STEP), _Iovec(source + at, _STEP)
                done = read(
                    owner.pid,
                    ctypes.byref(local),
                    ctypes.c_ulong(1),
                    ctypes.byref(remote),
                    ctypes.c_ulong(1),
                    ctypes.c_ulong(0),
                )
                if done != _STEP:
                    raise OSError(ctypes.get_errno(), "process_vm_readv")
            return _MANY * _STEP / (time.perf_counter() - started) / 1e9

        return in_turns({"in the caches": lambda: rate(1), "out of them": lambda: rate(_MANY)}, rounds)
    finally:
        owner.kill()
        owner.join()


def _memory() -> mmap.mmap:
    """Return memory whose pages are all allocated, because they were written."""
    memory = mmap.mmap(-1, _MANY * _STEP)
    memory.write(b"\1" * len(memory))
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _own(pipe: Connection) -> None:
    memory = _memory()
    pipe.send(_address(memory))
    pipe.recv()
    memory.close()
