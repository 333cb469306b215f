"""System requirements of tests beyond Python packages. Tests whose requirement is missing are skipped with a reason."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import cluster.hosts
from dissociated.errors import JavaNotFound, TransportError
from dissociated.transport.native.fabric.libfabric import ofi
from dissociated.transport.native.ucx import worker
from dissociated.transport.native.ucx.libucp import ucp
from support import pods
from support.injection import sqlite_calls_can_fail

#: Arrow's golden files: the directory `data` of apache/arrow-testing.
ARROW_TEST_DATA = Path(os.environ["ARROW_TEST_DATA"]) if os.environ.get("ARROW_TEST_DATA") else None
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
#: Bytes of /dev/shm that are enough for a run. The test files measured use at most 230 MB each, and four workers run
#: one file each.
DEV_SHM = 2 << 30
#: A command prefix that allows mounting file systems in a private namespace.
UNSHARED = ("unshare", "--user", "--map-root-user", "--mount")


@cache
def _ucx() -> str | None:
    """Start UCX here, because its descriptors stay open until the process ends and would look like a leak of a test."""
    try:
        for address in ("127.0.0.1", "::1"):
            for place in product((False, True), repeat=3):
                worker.context(worker.context_key(address, *place))
    except TransportError as error:
        return str(error)
    return None


@cache
def _libfabric() -> str | None:
    """Load libfabric here for the same reason as UCX."""
    try:
        ofi()
    except TransportError as error:
        return str(error)
    return None


def _libfabric_2() -> str | None:
    """Require libfabric 2, whose provider tcp has its own endpoints."""
    if reason := _libfabric():
        return reason
    new = int(ofi().version.split(".")[0]) >= 2
    return None if new else f"the provider tcp needs libfabric 2.0, and this is {ofi().version}"


@cache
def _ipv6() -> str | None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return None
    except OSError as error:
        return f"this host has no IPv6 loopback address: {error}"


@cache
def _java() -> str | None:
    if find_spec("pyspark") is None:
        return "pyspark is not installed"
    from dissociated.spark import java_home

    try:
        java_home()
    except JavaNotFound as error:
        return str(error)
    return None


def _root() -> str | None:
    return None if os.geteuid() == 0 else "only root can become somebody else"


@cache
def _tmpfs() -> str | None:
    if shutil.which(UNSHARED[0]) is None:
        return f"a tmpfs cannot be mounted here: there is no {UNSHARED[0]}(1)"
    probe = subprocess.run([*UNSHARED, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    return f"a tmpfs cannot be mounted here: {probe.stderr.strip()}" if probe.returncode else None


def _browser() -> str | None:
    return None if BROWSER else "there is no Chromium on this machine"


@cache
def _sqlite_calls() -> str | None:
    return None if sqlite_calls_can_fail() else "the library of Python's sqlite3 shows none of its own functions"


def _golden_files() -> str | None:
    return (
        "ARROW_TEST_DATA is not set: it is the directory `data` of apache/arrow-testing"
        if ARROW_TEST_DATA is None
        else None
    )


_MISSING: dict[str, Callable[[], str | None]] = {
    "ucx": _ucx,
    "libfabric": _libfabric,
    "libfabric 2": _libfabric_2,
    "ipv6": _ipv6,
    "java": _java,
    "root": _root,
    "tmpfs": _tmpfs,
    "namespaces": cache(cluster.hosts.missing),
    "pods": cache(pods.missing),
    "SQLite's calls": _sqlite_calls,
    "golden files": _golden_files,
    "browser": _browser,
}


def missing(what: str) -> str | None:
    """Return the reason why the machine lacks `what`, or None. Loads the library, which then stays open."""
    return _MISSING[what]()


def need(*what: str) -> None:
    """Skip the test if the machine lacks any of these requirements."""
    for one in what:
        if reason := missing(one):
            pytest.skip(reason)


def needs(medium: str) -> pytest.MarkDecorator:
    """Mark a test with the requirements of its media, named as in tests: "fabric, tcp", "ucx6"."""
    what = ["ipv6"] if medium.endswith("6") else []
    what += ["ucx"] if medium.startswith("ucx") else []
    what += ["libfabric 2" if medium == "fabric, tcp" else "libfabric"] if medium.startswith("fabric") else []
    return pytest.mark.needs(*what)


def media(names: Iterable[Any], medium: Callable[[Any], str] = str) -> list[Any]:
    """Return test parameters, each marked with the requirements of its medium."""
    return [pytest.param(name, id=str(name), marks=needs(medium(name))) for name in names]


def _java_home() -> str:
    from dissociated.spark import java_home

    return java_home()


#: Details of each requirement that the machine meets, such as its version and path.
_FOUND: dict[str, Callable[[], str]] = {
    "ucx": lambda: f"{ucp().version} from {ucp().path}",
    "libfabric": lambda: f"{ofi().version} from {ofi().path}",
    "java": _java_home,
    "golden files": lambda: str(ARROW_TEST_DATA),
    "browser": lambda: str(BROWSER),
}


def _dev_shm() -> str:
    """Return the size of /dev/shm, and a warning if a whole run may need more."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return f"missing, so tests will fail: {error}"
    enough = "" if size >= DEV_SHM else f", too small: tests may fail with less than {DEV_SHM >> 20} MB"
    return f"{size >> 20} MB{enough}"


def report() -> list[str]:
    """Return lines that list the machine's features and the tests that it skips."""
    reasons = {what: missing(what) for what in _MISSING}
    found = [f"{what}: {_FOUND.get(what, lambda: 'yes')()}" for what, reason in reasons.items() if reason is None]
    skipped = [f"skips what needs {what}: {reason}" for what, reason in reasons.items() if reason is not None]
    return [*found, f"/dev/shm: {_dev_shm()}", *skipped]
