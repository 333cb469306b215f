"""An error of one thread that another thread raises."""

from __future__ import annotations


class PendingError:
    """An error that was caught and is still to be raised. The caller guards it with a lock of its own."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    def set(self, error: BaseException | None) -> None:
        """Keep an error to be raised, or none."""
        self._error = error

    def raise_once(self) -> None:
        """Raise the error if there is one, which is then no longer pending."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # else the error, through this frame, would keep itself and the caller's messages alive
