"""Facts about this machine: the id of its boot, its name, and its memory."""

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
    """Return a text that identifies this boot of this host. Two processes with the same one can share memory.

    If DISSOCIATED_HOST names the host, that name is part of the text. So one machine can act as several hosts.
    """
    named = os.environ.get(_HOST)
    return f"{_booted()}/{named}" if named else _booted()


@once
def _booted() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_name() -> str:
    """Return the name of this host, for people and for other hosts: DISSOCIATED_HOST, or else the machine's name."""
    return os.environ.get(_HOST) or socket.gethostname()


def directory_id(path: str | os.PathLike[str] | int) -> str:
    """Return a text that identifies a directory, given by path or descriptor, within this boot.

    In another container, the same path may lead to another directory.
    """
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def machine_memory() -> int:
    """Return the size of this machine's memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the available memory in bytes, within the machine's memory and the limit of this control group."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # the file reads "max" if there is no limit
        limit, usage = (int((_CONTROL_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, limit - usage)
    return available


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches `host`, a name or an address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
