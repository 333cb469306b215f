"""Access control: tickets that are signed and expire, and bearer tokens.

A random ticket is the identifier of one publication. It is valid until the publication is replaced or dropped. A signed
ticket names a publication, a selection of its columns, and a time of expiry, and proves by a MAC that the server issued
it:

    32 bytes  HMAC-SHA256 of all that follows
     8 bytes  time of expiry: milliseconds since 1970
     2 bytes  length of the identifier of the publication
    the identifier
    the selection: the names of the columns that may be read, as a JSON list; empty for all columns

Integers are little-endian. Nothing in this file reads a clock.

A catalog and its nodes share one secret. All of them sign with it, and authenticate each other by a token that is
derived from it.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
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

from dissociated.control.roles import DEFAULT_ROLE, TOKEN_ROLES, Identity, Role
from dissociated.errors import AccessDenied, OptionError
from dissociated.protocol.request import MAX_IDENTIFIER

#: Decides about a bearer token. It returns the owner's name and role, or a name or True, which may read; or a false
#: value to refuse the token.
Authorize: TypeAlias = Callable[[str], object]

#: Owner of a token: a name, which may read, or a name and a role.
Owner: TypeAlias = str | tuple[str, Role | str]

_log = logging.getLogger(__name__)

_MAC = hashlib.sha256().digest_size
_ticket_header = struct.Struct("<QH")
_MAX_TICKET = MAX_IDENTIFIER - 64  # A request also names the part, which tells publications with one ticket apart.
_EXPIRY_STEPS = 8  # possible times of expiry in a lifetime

_FOREIGN = "this ticket was not made by this server, or was altered: look the dataset up again"
_EXPIRED = "this ticket has expired: look the dataset up again"
#: The message of DatasetNotFound for a ticket of no dataset.
UNKNOWN_TICKET = "no dataset has this ticket, which may have been replaced or dropped: look the dataset up again"


class Ticket(NamedTuple):
    """The bytes with which a client requests a dataset, and their expiry in seconds since 1970, or None for never."""

    data: bytes
    expires: float | None


class Grant(NamedTuple):
    """The rights that a signed ticket gives: to read a publication, or some of its columns."""

    identifier: bytes
    columns: tuple[str, ...] | None = None


class Signer:
    """A maker and checker of tickets that are valid for at most `lifetime` seconds.

    The expiry is rounded down to an eighth of the lifetime, so that a client that asks twice gets the same ticket.

    Raises:
        OptionError: The lifetime is not positive, or the secret has fewer than 16 bytes.
    """

    def __init__(self, secret: bytes, lifetime: float) -> None:
        if not lifetime > 0:
            raise OptionError(f"the lifetime of tickets is {lifetime!r}; it must be a positive number of seconds")
        _check_secret(secret)
        self._secret = secret
        self._lifetime = max(_EXPIRY_STEPS, round(min(lifetime, 1e9) * 1000))  # milliseconds

    def sign(self, grant: Grant, now: float) -> Ticket:
        """Return a ticket for `grant`. `now` is in seconds since 1970.

        Raises:
            OptionError: The ticket would be too long for a request.
        """
        identifier, columns = grant
        selection = b"" if columns is None else json.dumps(columns).encode()
        _check_length(_MAC + _ticket_header.size + len(identifier) + len(selection))
        step = self._lifetime // _EXPIRY_STEPS
        expires = (round(now * 1000) + self._lifetime) // step * step
        content = _ticket_header.pack(expires, len(identifier)) + identifier + selection
        return Ticket(self._mac(content) + content, expires / 1000)

    def check(self, ticket: bytes, now: float) -> Grant:
        """Return the rights that `ticket` gives. `now` is in seconds since 1970.

        Raises:
            AccessDenied: The ticket is not this server's, was altered, or has expired.
        """
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
        """Return a text that differs for every secret and reveals nothing of it.

        Servers with equal fingerprints accept each other's tickets.
        """
        return self._mac(b"a mark").hex()[:16]

    def _mac(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, hashlib.sha256)


class Unsigned:
    """Tickets that equal the identifier of a publication. They are valid for as long as the publication exists."""

    def sign(self, grant: Grant, now: float) -> Ticket:
        """Return a ticket for `grant`.

        Raises:
            OptionError: The grant is for some columns only, or too long for a request.
        """
        if grant.columns is not None:
            raise OptionError(
                "tickets for some columns must be signed: give the server a ticket_lifetime (--ticket-lifetime)"
            )
        _check_length(len(grant.identifier))
        return Ticket(grant.identifier, None)

    def check(self, ticket: bytes, now: float) -> Grant:
        """Return the rights that `ticket` gives if its publication exists."""
        return Grant(ticket)

    def fingerprint(self) -> str:
        """Return an empty text. See `Signer.fingerprint`."""
        return ""


@dataclass(frozen=True)
class Security:
    """The access control of a server, node or catalog. `security` makes it."""

    #: Makes and checks tickets.
    tickets: Signer | Unsigned = field(default_factory=Unsigned)
    #: Decides about bearer tokens; None if clients need none.
    authorize: Authorize | None = None
    #: Paths of the PEM files of the certificate and its key; None without TLS.
    certificate: tuple[str, str] | None = None
    #: Path of the PEM file of the certificates to trust in peers; None for the system's.
    roots: str | None = None
    #: Token by which catalogs and nodes authenticate each other; None without a common secret.
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
    """Return the access control that these options describe. Most options are those of `Server`.

    Args:
        ticket_lifetime: Seconds for which tickets are valid; None for unsigned tickets.
        secret: Secret that signs tickets, and by which peers authenticate each other.
        authorize: Callable that decides about bearer tokens, or the tokens.
        tls_cert: PEM file of the certificate.
        tls_key: PEM file of the certificate's key.
        tls_roots: PEM file of the certificates to trust in peers, in place of the system's.
        peers: Whether catalogs and nodes with the same `secret` accept each other, and no others, as peers.

    Raises:
        OptionError: The options contradict each other, or are invalid.
    """
    if secret is not None and ticket_lifetime is None and not peers:
        raise OptionError("a secret signs tickets only if they expire: give ticket_lifetime (--ticket-lifetime), too")
    if secret is not None:
        _check_secret(secret)
    if (tls_cert is None) != (tls_key is None):
        raise OptionError("TLS needs a certificate and its key: give both tls_cert and tls_key (--tls-cert, --tls-key)")
    return Security(
        Unsigned() if ticket_lifetime is None else Signer(secret or secrets.token_bytes(32), ticket_lifetime),
        None if authorize is None else authorizer(authorize),
        None if tls_cert is None or tls_key is None else (os.fspath(tls_cert), os.fspath(tls_key)),
        None if tls_roots is None else os.fspath(tls_roots),
        hmac.digest(secret, b"a peer", hashlib.sha256).hex() if peers and secret is not None else None,
    )


class Tokens:
    """Bearer tokens with the names of their owners and their roles. Only digests of the tokens are kept.

    A token without a role may read.

    Raises:
        OptionError: There is no token, or a token is invalid in a header.
    """

    def __init__(self, tokens: Iterable[str] | Mapping[str, Owner]) -> None:
        if isinstance(tokens, str):
            raise OptionError("authorize is one string: give a list of tokens")
        named = tokens if isinstance(tokens, Mapping) else {token: f"token {n}" for n, token in enumerate(tokens, 1)}
        if not named:
            raise OptionError("authorize has no token, so every client would be refused: give at least one token")
        self._owners: dict[bytes, Identity] = {}
        for token, owner in named.items():
            if token in TOKEN_ROLES:
                raise OptionError("a token is the name of a role: a role comes after a name and a token")
            self._owners[_digest(check_token(token))] = _identity(owner)

    @classmethod
    def read(cls, path: str | Path) -> Tokens:
        """Read tokens from a file, one a line: TOKEN, NAME TOKEN or NAME TOKEN ROLE.

        A line that begins with `#` is a comment.

        Raises:
            OptionError: The file cannot be read, has other lines, or repeats a token.
        """
        lines = _lines(path)
        owners = {line.token: (line.name or f"token {n}", line.role) for n, line in enumerate(lines, 1)}
        if len(owners) < len(lines):
            raise OptionError(
                f"the file {str(path)!r} has a token twice: give each owner a token of their own, with one role"
            )
        return cls(owners)

    def __call__(self, token: str) -> Identity | None:
        """Return the owner of a token and its role; None if the token is unknown."""
        return self._owners.get(_digest(token))


def read_token(path: str | Path) -> str:
    """Return the first token in a file of the format that `Tokens.read` reads.

    Raises:
        OptionError: There is no token, or the file cannot be read.
    """
    for line in _lines(path):
        return check_token(line.token)
    raise OptionError(f"the file {str(path)!r} has no token")


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret in a file: its whole content without surrounding white space.

    Raises:
        OptionError: The file cannot be read, or the secret is too short.
    """
    try:
        secret = Path(path).read_bytes().strip()
        _warn_if_readable(path)
    except OSError as error:
        raise OptionError(f"cannot read the secret from {os.fspath(path)!r}: {error.strerror}") from None
    _check_secret(secret)
    return secret


def check_token(token: str) -> str:
    """Return the token.

    Raises:
        OptionError: The token is invalid in a header. The message does not quote it.
    """
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise OptionError("the token has a space or a character other than printable ASCII")
    return token


def authorizer(authorize: Authorize | Iterable[str] | Mapping[str, Owner]) -> Authorize:
    """Return `authorize` if it is callable, or else a callable that decides by these tokens.

    Raises:
        OptionError: It is an asynchronous function, or see `Tokens`.
    """
    if inspect.iscoroutinefunction(authorize):
        raise OptionError("authorize is an async function, and is not awaited: give a function that returns the owner")
    return authorize if callable(authorize) else Tokens(authorize)


def identify(authorize: Authorize, token: str) -> Identity | None:
    """Return the owner of a token and its role; None if the token is not accepted.

    Raises:
        OptionError: The result is no owner, its role does not exist, or `authorize` raised an error. The message can be
            logged: it quotes neither the token nor anything from `authorize`, whose errors and results may contain it.
    """
    try:
        owner = authorize(token) or None
    except Exception as error:
        raise OptionError(f"authorize raised {type(error).__name__}") from None
    return None if owner is None else _identity(owner)


def _identity(owner: object) -> Identity:
    """Return the name and the role in a result of `authorize`."""
    if owner is True or isinstance(owner, str):
        return Identity("" if owner is True else owner, DEFAULT_ROLE)
    match owner:
        case (str(name), (str() | Role()) as role) if isinstance(owner, tuple):
            return Identity(name, Role.parse(role))
    raise OptionError(f"the owner of a token is a {type(owner).__name__}: give a name, a name and a role, or True")


def _check_length(length: int) -> None:
    if length > _MAX_TICKET:
        raise OptionError(
            f"a ticket of {length:,} bytes is too long, since it may have {_MAX_TICKET:,} at most: choose a shorter "
            "one, or grant fewer columns"
        )


def _check_secret(secret: bytes) -> None:
    if len(secret) < 16:
        raise OptionError(f"a secret of {len(secret)} bytes can be guessed: create one with secrets.token_bytes(32)")


class _Line(NamedTuple):
    name: str | None
    token: str
    role: Role


def _lines(path: str | Path) -> list[_Line]:
    try:
        text = Path(path).read_text("utf-8")
        _warn_if_readable(path)
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"cannot read tokens from {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        ) from None
    return [
        _line(path, number, words)
        for number, words in enumerate(map(str.split, text.splitlines()), 1)
        if words and not words[0].startswith("#")
    ]


def _line(path: str | Path, number: int, words: list[str]) -> _Line:
    """Parse a line. An error does not quote the line, because any of its words may be a token."""
    match [] if any(word.startswith("#") for word in words) else words:  # a comment is no token
        case [token] if token not in TOKEN_ROLES:
            return _Line(None, token, DEFAULT_ROLE)
        case [name, token] if token not in TOKEN_ROLES:
            return _Line(name, token, DEFAULT_ROLE)
        case [name, token, role] if role in TOKEN_ROLES:
            return _Line(name, token, TOKEN_ROLES[role])
    roles = ", ".join(TOKEN_ROLES)
    raise OptionError(
        f"line {number} of {str(path)!r} is not TOKEN, NAME TOKEN or NAME TOKEN ROLE; the roles are {roles}. "
        "A comment has a line of its own"
    )


def _warn_if_readable(path: str | os.PathLike[str]) -> None:
    """Log a warning if other users of this host can read a file.

    This is no error, because containers mount secrets that way.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH):
        _log.warning("secret file is readable by other users, close it with chmod 600: path=%s", path)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
