"""Stopping the node of a store on this host."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path

from dissociated.base.private import open_private_directory, read_private_file
from dissociated.errors import StoreError
from dissociated.node.launch import ADDRESS_FILE, NodeAddress
from dissociated.store.layout import NODE_LOG


class NodeProcess:
    """The process of the node that owns the store in `directory`, for a `with` block.

    Raises:
        ProcessLookupError: No such process can be seen from here.
        NotPrivate: Other users can access the directory.
        OSError: The directory cannot be read, for example because it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.store = directory.absolute()
        opened = open_private_directory(directory)
        try:
            self.address = _address(opened)
            # The process cannot be replaced by another one with the same id once it is open.
            self._descriptor = os.pidfd_open(self.address.pid)
            try:
                # The id may be that of another process: after a node was killed, or in another container.
                if not _has_open(self.address.pid, os.fstat(opened)):
                    raise ProcessLookupError
            except BaseException:
                os.close(self._descriptor)
                raise
        finally:
            os.close(opened)

    def stop(self, timeout: float) -> bool:
        """Tell the process to stop: it ends when its streams have ended. Return whether it ended within `timeout`."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float) -> bool:
        """Return whether the process ends within `timeout` seconds."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def log_file(store: Path) -> Path | None:
    """Return the log of a node that was started in the background; None if it was started otherwise."""
    log = store.absolute() / NODE_LOG
    return log if log.exists() else None


def _address(store: int) -> NodeAddress:
    try:
        return NodeAddress(**json.loads(read_private_file(ADDRESS_FILE, within=store)))
    except FileNotFoundError:
        raise ProcessLookupError from None
    except (ValueError, TypeError):
        raise StoreError(f"the file {ADDRESS_FILE} in the store is damaged, and gives no address") from None


def _has_open(pid: int, directory: os.stat_result) -> bool:
    """Return whether the process `pid` has this directory open, as the owner of a store does."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            status = descriptor.stat()
        except OSError:
            continue  # It was closed in the meantime.
        if (status.st_dev, status.st_ino) == (directory.st_dev, directory.st_ino):
            return True
    return False
