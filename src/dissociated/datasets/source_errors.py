"""Whatever a publisher's code raises, as an error whose reason a client can be told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from dissociated.errors import DissociatedError, FormatError, SourceError


@contextmanager
def source_errors(name: str) -> Iterator[None]:
    """Turn whatever the source of `name` raises into a SourceError, whose reason a client can be told."""
    try:
        yield
    except FormatError as error:
        raise SourceError(f"the source of {name!r} failed: {error}") from error
    except DissociatedError:
        raise
    except Exception as error:  # it is the publisher's code: anything may come out of it
        kind = type(error).__name__
        failed = SourceError(f"the source of {name!r} failed: {kind}: {error}")
        if not isinstance(error, pa.ArrowException):
            failed.peer_reason = f"the source of {name!r} failed ({kind}): the log of its server says more"
        raise failed from error
