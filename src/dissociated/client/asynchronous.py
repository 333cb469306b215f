"""Asynchronous variants of functions that open a reader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import pyarrow as pa

from dissociated.codec.device import DeviceReader

if TYPE_CHECKING:
    from dissociated.ipc.asynchronous import AsyncStreamReader

P = ParamSpec("P")


def asynchronous(
    open_reader: Callable[P, pa.RecordBatchReader | DeviceReader],
) -> Callable[P, Coroutine[Any, Any, AsyncStreamReader]]:
    """Return the variant of `open_reader` for `async for`. It blocks a thread in place of the event loop."""

    @wraps(open_reader)
    async def opened(*args: P.args, **kwargs: P.kwargs) -> AsyncStreamReader:
        # Imported on first use, because asyncio takes as long to import as all of this library.
        from dissociated.ipc.asynchronous import open_reader_async

        return await open_reader_async(open_reader, *args, **kwargs)

    opened.__name__ = f"{open_reader.__name__}_async"
    opened.__qualname__ = f"{open_reader.__qualname__}_async"
    opened.__doc__ = (
        f"`{open_reader.__name__}` for `async for`: awaited, it gives an `AsyncStreamReader`.\n\n"
        "It takes and raises the same, and blocks a thread in place of the event loop."
    )
    signature = inspect.signature(open_reader)
    opened.__signature__ = signature.replace(return_annotation="AsyncStreamReader")  # type: ignore[attr-defined]
    return opened
