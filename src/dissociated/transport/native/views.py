"""Memory as cffi sees it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from dissociated.base.buffers import Buffer


def view_of(ffi: Any, data: Buffer) -> Any:
    """cffi's view of a buffer, which it keeps.

    Arrow holds a memoryview for it. Where CPython finds one in a cycle that is garbage, it clears it although cffi has
    a view of it, and the process ends as that is given back.
    """
    return ffi.from_buffer(pa.py_buffer(data) if isinstance(data, memoryview) else data)
