"""Shared memory that is mapped a second time, privately for one process."""

from __future__ import annotations

import os
import resource

from dissociated.memory.private import keep_open
from dissociated.memory.shared import map_read_only, sealed_memfd


def test_files_are_kept_open_only_while_there_are_descriptors_for_what_is_still_to_be_mapped() -> None:
    descriptor = sealed_memfd("one", lambda file: os.write(file, b"x"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 8 * max(descriptor, 50)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        mapped = [(map_read_only(descriptor, 1), keep_open(descriptor)) for _ in range(most * 3 // 4)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(descriptor)
    assert mapped[0][1] is not None
