"""The counter of a catalog's changes in shared memory, by which readers on its host see that it has not changed.

The catalog counts in a memfd of 24 bytes: the number of changes so far, and 16 random bytes that tell this counter from
all others. It sets the number to 0 before it commits a change to its database, and to the new number before anybody can
see or be told of the change. A reader that finds the number from before its last question does not ask the catalog:
the answer is still the current state. If the number is 0, the reader has to ask.

A reader opens the memfd below `/proc`, which the kernel allows only to the same user. When the catalog ends, its
process has no such descriptor any more. The kernel takes a dead process's table of descriptors before it closes any of
them, so before another catalog can have the address or the database. A reader that finds the descriptor thus knows that
no other catalog has changed anything meanwhile.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import weakref
from contextlib import suppress
from typing import NamedTuple, Self

from dissociated.base.descriptors import owned
from dissociated.base.fork import ProcessBound
from dissociated.errors import RemoteProtocolError
from dissociated.memory.shared import Backing, create_memfd, map_received, reopen_read_only, seal

_NUMBER_SIZE = 8
_NONCE_SIZE = 16
_SIZE = _NUMBER_SIZE + _NONCE_SIZE


class CounterPlace(NamedTuple):
    """The place of a counter on its host: a process, the number of its descriptor, and the random bytes in hex."""

    process: int
    descriptor: int
    nonce: str

    @classmethod
    def parse(cls, plain: object) -> Self | None:
        """Return the place in a catalog's answer, or None if there is none."""
        match plain:
            case [int(process), int(descriptor), str(nonce)] if process > 0 and descriptor >= 0:
                return cls(process, descriptor, nonce)
        return None


class ChangeCounter(ProcessBound):
    """The counter of the catalog in this process. Only the thread that holds the lock of the database writes to it."""

    def __init__(self) -> None:
        self._descriptor = create_memfd("changes")
        os.ftruncate(self._descriptor, _SIZE)
        seal(self._descriptor, Backing.LIVE)
        nonce = secrets.token_bytes(_NONCE_SIZE)
        memory = memoryview(mmap.mmap(self._descriptor, _SIZE))
        memory[_NUMBER_SIZE:] = nonce
        # CPython copies an aligned word in one instruction. The system calls by which processes tell each other of a
        # change come after it in the order of all processors.
        self._number = memory[:_NUMBER_SIZE].cast("Q")
        #: The place, which answers name.
        self.place = CounterPlace(os.getpid(), self._descriptor, nonce.hex())
        self.bind_to_process()

    @property
    def number(self) -> int:
        """The number of changes, or 0 while a change is committed. Readers in all processes see it at once."""
        return self._number[0]

    @number.setter
    def number(self, number: int) -> None:
        self._number[0] = number

    def close(self) -> None:
        """Withdraw the counter; readers then ask the catalog. The number can still be changed, without effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        # Only now, when no reader trusts the shared number any more. Another thread may be using it.
        self._number = memoryview(bytearray(_NUMBER_SIZE)).cast("Q")

    def after_fork_in_child(self) -> None:
        """Close the child's copy. See `dissociated.base.fork`."""
        self.close()


class CounterView:
    """A view of the counter of a catalog on this host.

    Raises:
        OSError: The counter is gone, or this process may not see it.
        RemoteProtocolError: The descriptor is not a counter.
    """

    def __init__(self, place: CounterPlace) -> None:
        self.place = place
        self._name = str(place.descriptor)
        # An open directory of a process never shows another process, even if that gets the same id.
        self._directory = os.open(f"/proc/{place.process}/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)
        with owned(os.open(self._name, os.O_PATH | os.O_CLOEXEC, dir_fd=self._directory)) as place_descriptor:
            status = os.fstat(place_descriptor)
            if not stat.S_ISREG(status.st_mode):  # opening a FIFO could block
                raise RemoteProtocolError("the counter that the catalog named is not a memfd")
            with owned(reopen_read_only(place_descriptor)) as readable:
                memory = memoryview(map_received(readable, _SIZE, Backing.LIVE))
        if memory[_NUMBER_SIZE:].hex() != place.nonce:
            raise RemoteProtocolError("the counter that the catalog named is a file of another process")
        self._identity = status.st_dev, status.st_ino
        self._number = memory[:_NUMBER_SIZE].cast("Q")

    def read(self) -> int:
        """Return the number of changes, or 0 if the catalog has ended or is committing a change."""
        number = self._number[0]
        if number:
            with suppress(OSError):
                status = os.stat(self._name, dir_fd=self._directory)
                if (status.st_dev, status.st_ino) == self._identity:
                    return number
        return 0
