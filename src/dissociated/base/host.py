"""This machine: which boot of which host, its name, its memory."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress
from pathlib import Path

from dissociated.base.once import once

_HOST = "DISSOCIATED_HOST"
_CONTROL_GROUP = Path("/sys/fs/cgroup")


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


def directory_id(path: str | os.PathLike[str] | int) -> str:
    """Tell a directory, by its path or descriptor, from every other of this boot.

    In another container, its path may be another directory's.
    """
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """The bytes that may still be taken, of the machine's memory and of what this control group is limited to."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # "max", where there is no limit
        limit, used = (int((_CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, limit - used)
    return available


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches `host`, a name or an address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
