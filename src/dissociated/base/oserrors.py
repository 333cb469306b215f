"""What the operating system refuses, as errors that tell the user what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from dissociated.errors import DissociatedError, StoreError


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn what a file raises into a StoreError that says what to do: the system's refusals, or that it is closed."""
    try:
        yield
    except DissociatedError:  # some are such, too
        raise
    except ValueError as error:
        raise StoreError(f"{what}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreError(
                f"there is no space left for {what} ({error.strerror}): free some, enlarge the file system, "
                "or choose another directory"
            ) from error
        raise StoreError(f"{what}: {error.strerror or error}") from error
