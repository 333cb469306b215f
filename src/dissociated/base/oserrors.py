"""Errors of the operating system, turned into errors with advice for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from dissociated.errors import DissociatedError, StoreError


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
