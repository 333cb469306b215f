"""The roles of tokens, and the role that each call needs.

A role may do everything that the roles before it may. A call that is missing in these tables is refused.
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
    #: Also publish, overwrite, append to and drop datasets.
    WRITE = 2
    #: Also see the readers, their datasets and their addresses.
    ADMIN = 3
    #: Act as a catalog or node, which is proved by the shared secret. No token has this role.
    PEER = 4

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: object) -> Role:
        """Return the role with this name.

        Raises:
            OptionError: No token can have such a role. The message does not quote the name.
        """
        try:
            return TOKEN_ROLES[str(text)]
        except KeyError:
            raise OptionError(f"the role is unknown: the roles of tokens are {', '.join(TOKEN_ROLES)}") from None


#: The roles that a token may have, by name.
TOKEN_ROLES: Mapping[str, Role] = {str(role): role for role in (Role.READ, Role.WRITE, Role.ADMIN)}

#: Role of a token for which no role is named.
DEFAULT_ROLE = Role.READ


class Identity(NamedTuple):
    """The name of a token's owner, and the token's role."""

    name: str
    role: Role = DEFAULT_ROLE


#: The calls of Flight. DoAction needs the role of its action, too.
FLIGHT_CALLS: Mapping[str, Role] = {
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
    "current": Role.READ,
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
    "forget": Role.ADMIN,
    "prepare": Role.PEER,
    "over": Role.PEER,
    "register": Role.PEER,
    "heartbeat": Role.PEER,
    "leave": Role.PEER,
}

#: The pages that a server provides over HTTP. None means that a page needs no token.
PAGES: Mapping[str, Role | None] = {
    "/healthz": None,
    "/metrics": Role.READ,
    "/": Role.ADMIN,
    "/page.css": Role.ADMIN,
    "/page.js": Role.ADMIN,
    "/status.json": Role.ADMIN,
}
