"""The URI of a catalog, which determines who can reach the catalog.

    grpc://HOST:PORT            every user who can reach the port
    grpc+tls://HOST:PORT        every user who can reach the port; connections are encrypted
    grpc+unix:///DIR/FILE.sock  only this user and root: a Unix socket in a private directory

The name of a socket ends in `.sock`, so that `grpc+unix:///DIR/FILE.sock/NAME` can name a dataset, too.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
from pathlib import Path
from urllib.parse import quote

from dissociated.base.host import is_loopback
from dissociated.base.private import open_private_directory
from dissociated.control.access import Security
from dissociated.errors import AccessDenied, NotPrivate, TransportError, UriError
from dissociated.uri import Uri

#: The environment variable with the URI of the catalog for everybody who names none.
CATALOG_VARIABLE = "DISSOCIATED_CATALOG"
#: The environment variable with the token for the catalog in CATALOG_VARIABLE.
TOKEN_VARIABLE = "DISSOCIATED_TOKEN"
#: The environment variable with the path of the certificates that clients of the command line and of
#: CATALOG_VARIABLE trust.
ROOTS_VARIABLE = "DISSOCIATED_TLS_ROOTS"

UNIX_SCHEME = "grpc+unix"
_SUFFIX = ".sock"
_PATH_MAX = 107  # bytes, by struct sockaddr_un
_UNUSABLE = "%#?"  # gRPC decodes a path twice, and would read the rest as a query


def is_unix(uri: str) -> bool:
    """Return whether a catalog at `uri` answers on a Unix socket."""
    return uri.startswith(f"{UNIX_SCHEME}:")


def unix_uri(path: Path) -> str:
    """Return the URI of a catalog that answers on the Unix socket `path`."""
    return f"{UNIX_SCHEME}://{quote(os.fspath(path))}"


def socket_path(uri: str) -> Path:
    """Return the path of the Unix socket in `uri`."""
    return Path(Uri.parse(uri).path)


def split_unix(uri: str) -> tuple[str, str]:
    """Split `grpc+unix:///DIR/FILE.sock/NAME` into the URI of the catalog and the name, which may be empty."""
    head, separator, name = uri.partition(f"{_SUFFIX}/")
    return (f"{head}{_SUFFIX}", name) if separator else (uri, "")


def is_usable(path: Path) -> bool:
    """Return whether Flight can listen on a Unix socket at `path`, and a URI can name a dataset there."""
    text = os.fspath(path)
    fits = len(os.fsencode(text)) <= _PATH_MAX and not any(sign in text for sign in _UNUSABLE)
    return fits and _SUFFIX not in os.fspath(path.parent)


def check_socket(path: Path) -> None:
    """Raise if a catalog cannot listen on the Unix socket `path`, or if other users could reach it.

    Raises:
        UriError: The path is not absolute, or Flight does not accept its characters or length.
        TransportError: Another server listens there, another file is there, or other users may enter the directory.
    """
    if not path.is_absolute() or path.suffix != _SUFFIX or not is_usable(path):
        raise UriError(
            f"a catalog cannot listen at {str(path)!r}: its path must be absolute, end in {_SUFFIX}, have at most "
            f"{_PATH_MAX} bytes, none of them {' '.join(_UNUSABLE)}, and no directory on it has {_SUFFIX} in its name"
        )
    try:
        os.close(open_private_directory(path.parent))
        try:
            is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
        except FileNotFoundError:
            return
        if not is_socket:
            raise TransportError(f"the catalog cannot listen at {str(path)!r}: a file that is not a socket is there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                return  # The server was killed, and gRPC will replace its socket.
    except NotPrivate as error:
        raise TransportError(f"the catalog cannot listen at {str(path)!r}: {error}") from None
    except OSError as error:
        raise TransportError(f"the catalog cannot listen at {str(path)!r}: {error.strerror}") from None
    raise TransportError(f"the catalog cannot listen at {str(path)!r}: another server answers there")


def check_owner(path: Path) -> None:
    """Raise AccessDenied if the catalog at the Unix socket `path` belongs to another user, or admits only another user.

    A missing socket is not an error here; the attempt to connect reports it.
    """
    try:
        owner = os.lstat(path).st_uid
        closed = not os.access(path, os.W_OK)
    except PermissionError:
        closed = True
    except OSError:
        return
    if closed:
        raise AccessDenied(f"the catalog at {unix_uri(path)} is accessible to another user only")
    if owner not in (os.geteuid(), 0):
        raise AccessDenied(
            f"the catalog at {unix_uri(path)} belongs to the user {_user_name(owner)}: only one of your own is trusted"
        )


def describe_reach(uri: str, security: Security) -> str | None:
    """Return a warning that says who can reach an unguarded catalog at `uri`, with the remedy.

    The result is None if only the user of the catalog can reach it, or if the catalog checks tokens.
    """
    if is_unix(uri) or security.authorize is not None:
        return None
    audience = "every user of this host" if is_loopback(Uri.parse(uri).host) else "everybody who reaches this port"
    return (
        f"{audience} can list, read, overwrite and drop: give it tokens (--token-file FILE), or let it answer this "
        "user alone (grpc+unix:)"
    )


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
