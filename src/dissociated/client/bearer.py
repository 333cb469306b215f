"""The options of a Flight client: how it reconnects, its token, and the certificates that it trusts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from dissociated.errors import OptionError

#: gRPC would wait for up to two minutes before it tries again to reach a server that was not there.
_RECONNECT = {"grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 2000}


class Bearer(flight.ClientMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no type hints
    """A middleware factory that sends a token with each call of a client."""

    def __init__(self, token: str) -> None:
        self._headers = {"authorization": f"Bearer {token}"}

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        """Return the middleware that adds the header to one call."""
        return _BearerHeaders(self._headers)


class _BearerHeaders(flight.ClientMiddleware):  # type: ignore[misc]  # pyarrow has no type hints
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def sending_headers(self) -> dict[str, str]:
        return self._headers


def client_options(token: str | None, tls_roots: str | None) -> dict[str, Any]:
    """Return the options of a Flight client that sends `token` and trusts only the certificates in `tls_roots`.

    Raises:
        OptionError: The file `tls_roots` cannot be read.
    """
    options: dict[str, Any] = {"generic_options": [*_RECONNECT.items()]}
    if token is not None:
        options["middleware"] = [Bearer(token)]
    if tls_roots is not None:
        try:
            options["tls_root_certs"] = Path(tls_roots).read_bytes()
        except OSError as error:
            raise OptionError(f"cannot read {tls_roots} for TLS: {error.strerror}") from None
    return options
