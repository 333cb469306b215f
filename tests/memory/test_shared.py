from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dissociated.base.oserrors import store_errors
from dissociated.errors import StoreError
from dissociated.memory.shared import Backing, create_memfd, map_read_only, reopen_read_only, seal, write_parts


def test_a_sealed_memfd_never_changes() -> None:
    descriptor = create_memfd("test")
    try:
        os.write(descriptor, b"content")
        seal(descriptor, Backing.SEALED)
        for change in (lambda: os.write(descriptor, b"x"), lambda: os.ftruncate(descriptor, 1)):
            with pytest.raises(PermissionError):
                change()
        reader = reopen_read_only(descriptor)
        memory = map_read_only(reader, 7)
        os.close(reader)
        assert memory.to_pybytes() == b"content"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["a" * 300, "\u58f2" * 80, "\N{GRINNING FACE}" * 60], ids=["a", "three", "four"])
def test_a_name_of_any_length_names_a_memfd(name: str) -> None:
    descriptor = create_memfd(name)
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    shown = target.removeprefix("/memfd:dissociated:").removesuffix(" (deleted)")
    assert name.startswith(shown)
    assert len(shown.encode()) > 200


def test_parts_are_written_one_after_the_other(tmp_path: Path) -> None:
    """Write more parts than the system accepts in one call, some of them empty."""
    parts = [bytes([n % 256]) * (n % 5) for n in range(5000)]
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        assert write_parts(descriptor, parts, 3) == sum(map(len, parts))
    finally:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"\0\0\0" + b"".join(parts)


def test_descriptors_are_not_inherited() -> None:
    descriptor = create_memfd("test")
    reader = reopen_read_only(descriptor)
    assert not os.get_inheritable(descriptor)
    assert not os.get_inheritable(reader)
    os.close(descriptor)
    os.close(reader)


def test_an_empty_mapping() -> None:
    assert map_read_only(-1, 0).size == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_explained(number: int) -> None:
    with (
        pytest.raises(StoreError, match=r"no space is left for the segment .*: free some"),
        store_errors("the segment"),
    ):
        raise OSError(number, os.strerror(number))


def test_other_failures_are_named() -> None:
    with pytest.raises(StoreError, match="writing x: Permission denied"), store_errors("writing x"):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))
