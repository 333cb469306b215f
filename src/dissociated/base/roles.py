"""The roles of tokens, and the role that each call needs.

Each role may do what those before it may. A call that is not in these tables is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from dissociated.errors import OptionError


class Role(IntEnum):
    """A set of calls that the bearer of a token may make."""

    #: List, describe and read datasets.
    READ = 1
    #: Publish, overwrite, append to and drop datasets, too.
    WRITE = 2
    #: See who reads what, and from where, too.
    ADMIN = 3
    #: Be a catalog or a node, which prove it by the secret that they share. No token has this role.
    PEER = 4

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: object) -> Role:
        """Return the role of this name, which a token may have. Raises OptionError, which does not quote the name."""
        try:
            return TOKEN_ROLES[str(text)]
        except KeyError:
            raise OptionError(f"the role of a token is {', '.join(TOKEN_ROLES)}, and nothing else") from None


#: The roles that a token may have, by name.
TOKEN_ROLES: Mapping[str, Role] = {str(role): role for role in (Role.READ, Role.WRITE, Role.ADMIN)}

#: The role of a token that none was given for.
DEFAULT_ROLE = Role.READ


class Identity(NamedTuple):
    """The name of the owner of a token, and its role."""

    name: str
    role: Role = DEFAULT_ROLE


#: The calls of Flight. DoAction needs the role of its action, too.
CALLS: Mapping[str, Role] = {
    "Handshake": Role.READ,
    "ListFlights": Role.READ,
    "GetFlightInfo": Role.READ,
    "GetSchema": Role.READ,
    "DoGet": Role.READ,
    "DoPut": Role.WRITE,
    "DoExchange": Role.WRITE,
    "DoAction": Role.READ,
    "ListActions": Role.READ,
}

#: The actions of a catalog.
ACTIONS: Mapping[str, Role] = {
    "versions": Role.READ,
    "nodes": Role.READ,
    "RenewFlightEndpoint": Role.READ,
    "CancelFlightInfo": Role.READ,
    "stage": Role.WRITE,
    "reserve": Role.WRITE,
    "commit": Role.WRITE,
    "committed": Role.WRITE,
    "discard": Role.WRITE,
    "abort": Role.WRITE,
    "drop": Role.WRITE,
    "status": Role.ADMIN,
    "prepare": Role.PEER,
    "over": Role.PEER,
    "register": Role.PEER,
    "heartbeat": Role.PEER,
    "leave": Role.PEER,
}

#: The pages that a server answers over HTTP. None: they need no token.
PAGES: Mapping[str, Role | None] = {
    "/healthz": None,
    "/metrics": Role.READ,
    "/": Role.ADMIN,
    "/page.css": Role.ADMIN,
    "/page.js": Role.ADMIN,
    "/status.json": Role.ADMIN,
}
