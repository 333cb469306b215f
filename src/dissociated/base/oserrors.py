"""Errors of the operating system, turned into errors with advice for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    SourceError,
    StoreError,
    TransportError,
)

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN, errno.ENOTCONN, errno.EBADF, errno.ECONNABORTED}


@contextmanager
def store_errors(operation: str) -> Iterator[None]:
    """Turn a file's OSError or ValueError (a closed file) into a StoreError that tells the user how to go on."""
    try:
        yield
    except DissociatedError:  # some of these are OSErrors, too
        raise
    except ValueError as error:
        raise StoreError(f"{operation}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(
                f"no space is left for {operation} ({error.strerror}): free some, enlarge the file system, or choose "
                "another directory"
            ) from error
        raise StoreError(f"{operation}: {error.strerror or error}") from error


def socket_error(error: OSError, operation: str) -> DissociatedError:
    """Convert an error of the operating system.

    Args:
        error: The error.
        operation: The failed action, for the message, such as "sending to PEER".

    Returns:
        The error to raise.
    """
    if isinstance(error, DissociatedError):  # DeadlineExceeded is both
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(f"{operation}: no answer in time")
    if error.errno == errno.EFAULT:  # the memory is unreadable because a mapped file was truncated
        return SourceError(f"{operation}: a file that is being served has become shorter")
    if error.errno in _GONE:
        return ConnectionClosed(f"{operation}: the peer closed the connection")
    return TransportError(f"{operation}: {error.strerror or error}")
