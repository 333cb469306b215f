"""This machine: which boot of which host, its name, its memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dissociated.once import once

_HOST = "DISSOCIATED_HOST"


def boot_id() -> str:
    """Tells this boot of this host from every other: two processes with the same one can share memory.

    Where DISSOCIATED_HOST names the host, its name is part of that: so one machine can be several hosts.
    """
    named = os.environ.get(_HOST)
    return f"{_booted()}/{named}" if named else _booted()


@once
def _booted() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_name() -> str:
    """The name of this host, for people and for other hosts: DISSOCIATED_HOST, or what the machine calls itself."""
    return os.environ.get(_HOST) or socket.gethostname()


def directory_id(path: str | os.PathLike[str]) -> str:
    """Tells a directory from every other of this boot, since in another container its path may be another's."""
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
