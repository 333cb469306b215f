"""Access control for a catalog: TLS, and a bearer token in each call."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Any

import pyarrow.flight as flight

from dissociated.base.limited_log import LimitedLog
from dissociated.control.access import Security, identify
from dissociated.control.roles import ACTIONS, FLIGHT_CALLS, Role
from dissociated.errors import OptionError

_log = logging.getLogger(__name__)

_MIDDLEWARE = "guard"
_HEADER = "authorization"
_AUTH_SCHEME = "bearer"
#: The name of each call in Flight.proto.
CALL_NAMES = {method: method.name.title().replace("_", "") for method in flight.FlightMethod}


def server_options(uri: str, security: Security) -> dict[str, Any]:
    """Return the options for a Flight server at `uri`: middleware that checks tokens, and certificates for TLS.

    Raises:
        OptionError: The certificate is missing, or a file cannot be read.
    """
    options: dict[str, Any] = {}
    if security.authorize is not None or security.peer is not None:
        options["middleware"] = {_MIDDLEWARE: Guard(security)}
    if uri.startswith("grpc+tls:"):
        if security.certificate is None:
            raise OptionError(
                f"a catalog at {uri!r} needs a certificate and its key: give tls_cert and tls_key "
                "(--tls-cert, --tls-key)"
            )
        options["tls_certificates"] = [tuple(map(_read, security.certificate))]
    return options


class Guard(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no type hints
    """Middleware that admits calls whose bearer token has the required role.

    Catalogs and nodes that have the same secret are admitted as peers.
    """

    def __init__(self, security: Security) -> None:
        self._authorize = security.authorize
        self._peer = security.peer
        self._log = LimitedLog(_log)  # Entries have no peer: Flight does not tell middleware the address of the client.

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> Caller:
        """Admit the call, or raise. Neither tokens nor values derived from them are logged."""
        caller = self._identify(info, headers)
        call = CALL_NAMES.get(info.method, "")
        caller.require(call, FLIGHT_CALLS.get(call, Role.PEER))
        return caller

    def _identify(self, info: Any, headers: dict[str, list[str]]) -> Caller:
        tokens = [token for scheme, token in map(_split_scheme, headers.get(_HEADER, ())) if scheme == _AUTH_SCHEME]
        if self._peer is not None and any(hmac.compare_digest(token.encode(), self._peer.encode()) for token in tokens):
            return Caller(Role.PEER, self._log)
        if self._authorize is None:
            return Caller(Role.ADMIN, self._log)
        if not tokens:
            raise self._unauthenticated(
                info, "the catalog requires a token: send the header 'authorization: Bearer TOKEN'"
            )
        for token in tokens:
            try:
                owner = identify(self._authorize, token)
            except OptionError as error:
                self._log.write(logging.ERROR, "token check failed: error=%s", str(error), event="authorize")
                raise self._unauthenticated(info, "the catalog could not check the token") from None
            if owner is not None:
                fields = {"identity": owner.name} if owner.name else {}
                _log.debug("call accepted: method=%s", info.method.name, extra={"method": info.method.name, **fields})
                return Caller(owner.role, self._log)
        raise self._unauthenticated(info, "the catalog does not accept this token: it may have been withdrawn")

    def _unauthenticated(self, info: Any, reason: str) -> flight.FlightUnauthenticatedError:
        method = info.method.name
        fields = {"method": method}
        self._log.write(
            logging.WARNING, "call refused: method=%s reason=%s", method, reason, event=method, fields=fields
        )
        return flight.FlightUnauthenticatedError(reason)


class Caller(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no type hints
    """The caller of a method, with the role that its token or secret gives."""

    def __init__(self, role: Role, log: LimitedLog) -> None:
        self._role = role
        self._log = log

    def require(self, call: str, role: Role) -> None:
        """Raise FlightUnauthorizedError unless the caller has `role`, which `call` needs, or a higher role."""
        if self._role >= role:
            return
        self._log.write(
            logging.WARNING,
            "call refused: method=%s needed_role=%s role=%s",
            call,
            role,
            self._role,
            event=call,
        )
        if role is Role.PEER:
            raise flight.FlightUnauthorizedError(
                "only catalogs and nodes with the same secret may call this: start both with that secret"
            )
        raise flight.FlightUnauthorizedError(
            f"{call} needs the role {role}, and this token has the role {self._role}: a line of the catalog's token "
            "file is NAME TOKEN ROLE"
        )


def require_action(context: Any, action: str) -> None:
    """Raise FlightUnauthorizedError unless the caller has the role that an action needs.

    Without tokens and without a secret, every caller may run every action.
    """
    caller = context.get_middleware(_MIDDLEWARE)
    if caller is not None:
        caller.require(action, ACTIONS.get(action, Role.PEER))


def _split_scheme(header: str) -> tuple[str, str]:
    scheme, _, token = header.partition(" ")
    return scheme.lower(), token.strip()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {str(path)!r} for TLS: {error.strerror}") from None
