"""Who may have what: tickets that are signed and expire, and bearer tokens.

A random ticket is the identifier of one publication: it is good until that is replaced or dropped. A signed one says
which publication, which part of it and until when, and proves by a MAC that the server said so:

    32 bytes  HMAC-SHA256 of all that follows
     8 bytes  when it expires: milliseconds since 1970
     2 bytes  length of the identifier of the publication
    the identifier
    the selection: the names of its columns that may be read, as a JSON list; empty for all there are

Integers are little-endian. Nothing here reads a clock.

A catalog and its nodes share one secret: all of them sign with it, and know each other by a token that is made of it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dissociated.base.roles import DEFAULT_ROLE, TOKEN_ROLES, Identity, Role
from dissociated.errors import AccessDenied, OptionError

#: Given a bearer token, says whose it is: a name and a role, or a name or just True, which may read; or nothing, false.
Authorize: TypeAlias = Callable[[str], object]

#: Whose a token is: a name, which may read, or a name and the role.
Owner: TypeAlias = str | tuple[str, Role | str]

_log = logging.getLogger(__name__)

_MAC = hashlib.sha256().digest_size
_ticket_header = struct.Struct("<QH")
_EXPIRY_STEPS = 8  # in a lifetime

_FOREIGN = "this ticket was not made by this server, or was altered: look the dataset up again"
_EXPIRED = "this ticket has expired: look the dataset up again"


class Ticket(NamedTuple):
    """What a client asks with, and when that ends: seconds since 1970, None for never."""

    data: bytes
    expires: float | None


class Grant(NamedTuple):
    """What a signed ticket is good for: a publication, or some columns of it."""

    identifier: bytes
    columns: tuple[str, ...] | None = None


class Signer:
    """Makes tickets that are good for at most `lifetime` seconds, and checks them.

    The end is rounded down to an eighth of the lifetime, so that a client that asks twice gets the same ticket. Raises
    OptionError for a lifetime that is not positive, and for a secret of fewer than 16 bytes.
    """

    def __init__(self, secret: bytes, lifetime: float) -> None:
        if not lifetime > 0:
            raise OptionError(f"the lifetime of tickets is a positive number of seconds, not {lifetime}")
        _check_secret(secret)
        self._secret = secret
        self._lifetime = max(_EXPIRY_STEPS, round(min(lifetime, 1e9) * 1000))  # milliseconds

    def sign(self, grant: Grant, now: float) -> Ticket:
        """A ticket for what is granted."""
        identifier, columns = grant
        selection = b"" if columns is None else json.dumps(columns).encode()
        step = self._lifetime // _EXPIRY_STEPS
        expires = (round(now * 1000) + self._lifetime) // step * step
        content = _ticket_header.pack(expires, len(identifier)) + identifier + selection
        return Ticket(self._mac(content) + content, expires / 1000)

    def check(self, ticket: bytes, now: float) -> Grant:
        """What `ticket` is good for. Raises AccessDenied where it is foreign, altered or expired."""
        mac, content = ticket[:_MAC], ticket[_MAC:]
        if len(content) < _ticket_header.size or not hmac.compare_digest(mac, self._mac(content)):
            raise AccessDenied(_FOREIGN)
        expires, length = _ticket_header.unpack_from(content)
        if now * 1000 >= expires:
            raise AccessDenied(_EXPIRED)
        end = _ticket_header.size + length
        columns = tuple(json.loads(content[end:])) if content[end:] else None
        return Grant(content[_ticket_header.size : end], columns)

    def fingerprint(self) -> str:
        """A text that differs for every secret and reveals nothing of it. Equal ones accept each other's tickets."""
        return self._mac(b"a mark").hex()[:16]

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, hashlib.sha256)


class Unsigned:
    """Tickets that are the identifiers themselves: good for as long as the publication is there."""

    def sign(self, grant: Grant, now: float) -> Ticket:
        """A ticket for what is granted. Raises OptionError where that is some columns alone."""
        if grant.columns is not None:
            raise OptionError("only signed tickets can be for some columns: give the server a ticket_lifetime")
        return Ticket(grant.identifier, None)

    def check(self, ticket: bytes, now: float) -> Grant:
        """What `ticket` is good for, if there is such a publication."""
        return Grant(ticket)

    def fingerprint(self) -> str:
        """See `Signer.fingerprint`."""
        return ""


@dataclass(frozen=True)
class Security:
    """How a server, a node or a catalog is guarded. `security` makes it."""

    #: Makes and checks tickets.
    tickets: Signer | Unsigned = field(default_factory=Unsigned)
    #: Says whose a bearer token is; None where nobody is asked for one.
    authorize: Authorize | None = None
    #: Paths of the PEM files of the certificate and its key; None without TLS.
    certificate: tuple[str, str] | None = None
    #: Path of the PEM file of the certificates to trust in peers; None for the system's.
    roots: str | None = None
    #: The token by which catalogs and nodes know each other; None without a common secret.
    peer: str | None = field(default=None, repr=False)


def security(
    *,
    ticket_lifetime: float | None = None,
    secret: bytes | None = None,
    authorize: Authorize | Iterable[str] | Mapping[str, Owner] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
    tls_roots: str | os.PathLike[str] | None = None,
    peers: bool = False,
) -> Security:
    """What these options mean; most are those of `Server`. Raises OptionError where they make no sense.

    With `peers`, catalogs and nodes that have the same `secret` know each other by it, and nobody else is one of them.
    `tls_roots` are the certificates that they trust in each other, in place of the system's.
    """
    if secret is not None and ticket_lifetime is None and not peers:
        raise OptionError("a secret signs tickets, which needs a ticket_lifetime")
    if secret is not None:
        _check_secret(secret)
    if (tls_cert is None) != (tls_key is None):
        raise OptionError("TLS needs a certificate and its key: give both tls_cert and tls_key")
    return Security(
        Unsigned() if ticket_lifetime is None else Signer(secret or secrets.token_bytes(32), ticket_lifetime),
        None if authorize is None else authorizer(authorize),
        None if tls_cert is None or tls_key is None else (os.fspath(tls_cert), os.fspath(tls_key)),
        None if tls_roots is None else os.fspath(tls_roots),
        hmac.digest(secret, b"a peer", hashlib.sha256).hex() if peers and secret is not None else None,
    )


class Tokens:
    """Bearer tokens, the names of those they belong to, and their roles. Only digests of the tokens are kept.

    A token that is given without a role may read. Raises OptionError if there is no token, or one that no header can
    carry.
    """

    def __init__(self, tokens: Iterable[str] | Mapping[str, Owner]) -> None:
        if isinstance(tokens, str):
            raise OptionError("give a list of tokens, not one string")
        named = tokens if isinstance(tokens, Mapping) else {one: f"token {n}" for n, one in enumerate(tokens, 1)}
        if not named:
            raise OptionError("there is no token, so nobody could come in: give at least one")
        self._owners: dict[bytes, Identity] = {}
        for token, owner in named.items():
            if token in TOKEN_ROLES:
                raise OptionError("the name of a role is no token: a role comes after a name and a token")
            self._owners[_digest(check_token(token))] = _identity(owner)

    @classmethod
    def read(cls, path: str | Path) -> Tokens:
        """Return the tokens in a file, one a line: TOKEN, NAME TOKEN or NAME TOKEN ROLE. `#` begins a comment.

        Raises OptionError if the file cannot be read, or has other lines.
        """
        lines = _lines(path)
        found = {line.token: (line.name or f"token {n}", line.role) for n, line in enumerate(lines, 1)}
        if len(found) < len(lines):
            raise OptionError(f"a token stands in {path} twice: give everybody another, with one role")
        return cls(found)

    def __call__(self, token: str) -> Identity | None:
        """Return whose token it is, and its role; None if it is nobody's."""
        return self._owners.get(_digest(token))


def read_token(path: str | Path) -> str:
    """The first token in a file such as `Tokens.read` reads. Raises OptionError where there is none."""
    for line in _lines(path):
        return check_token(line.token)
    raise OptionError(f"there is no token in {path}")


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file: all of it, but for white space around it. Raises OptionError."""
    try:
        secret = Path(path).read_bytes().strip()
        _warn_if_readable(path)
    except OSError as error:
        raise OptionError(f"cannot read a secret from {os.fspath(path)}: {error.strerror}") from None
    _check_secret(secret)
    return secret


def check_token(token: str) -> str:
    """The token itself. Raises OptionError, which does not quote it, where no header can carry it."""
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise OptionError("a token consists of printable ASCII characters and has no spaces")
    return token


def authorizer(authorize: Authorize | Iterable[str] | Mapping[str, Owner]) -> Authorize:
    """Return what decides about tokens: the callable itself, or one made of the tokens that are given."""
    return authorize if callable(authorize) else Tokens(authorize)


def identify(authorize: Authorize, token: str) -> Identity | None:
    """Return whose token it is, and its role; None if it is not accepted.

    Raises what the operator's `authorize` raises, and OptionError for a role that does not exist.
    """
    owner = authorize(token)
    return _identity(owner) if owner else None


def _identity(owner: object) -> Identity:
    """Return an owner as `authorize` may say it, with its role."""
    if not isinstance(owner, tuple):
        return Identity(owner if isinstance(owner, str) else "", DEFAULT_ROLE)
    name, role = owner
    return Identity(str(name), role if role in TOKEN_ROLES.values() else Role.parse(role))


def _check_secret(secret: bytes) -> None:
    if len(secret) < 16:
        raise OptionError(f"a secret of {len(secret)} bytes can be guessed: take secrets.token_bytes(32)")


class _Line(NamedTuple):
    name: str | None
    token: str
    role: Role


def _lines(path: str | Path) -> list[_Line]:
    try:
        text = Path(path).read_text("utf-8")
        _warn_if_readable(path)
    except (OSError, UnicodeError) as error:
        raise OptionError(f"cannot read tokens from {path}: {getattr(error, 'strerror', None) or error}") from None
    return [
        _line(path, number, words)
        for number, words in enumerate(map(str.split, text.splitlines()), 1)
        if words and not words[0].startswith("#")
    ]


def _line(path: str | Path, number: int, words: list[str]) -> _Line:
    """Return what a line says. An error does not quote it: any word may be a token."""
    match words:
        case [token] if token not in TOKEN_ROLES:
            return _Line(None, token, DEFAULT_ROLE)
        case [name, token] if token not in TOKEN_ROLES:
            return _Line(name, token, DEFAULT_ROLE)
        case [name, token, role] if role in TOKEN_ROLES:
            return _Line(name, token, TOKEN_ROLES[role])
    roles = ", ".join(TOKEN_ROLES)
    raise OptionError(f"line {number} of {path} is not TOKEN, NAME TOKEN or NAME TOKEN ROLE; the roles are {roles}")


def _warn_if_readable(path: str | os.PathLike[str]) -> None:
    """Say so where other users of this host can read a file. No error: that is how containers mount secrets."""
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning("other users of this host may read %s: chmod 600 %s", path, path)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
