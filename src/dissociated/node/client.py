"""The client of a catalog, which is by default the catalog of this user's node on this host."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dissociated.base.buffers import MAX_METADATA
from dissociated.client.client import Client
from dissociated.client.request import MAX_PARALLEL, TIMEOUT
from dissociated.control.catalog_uri import CATALOG_VARIABLE, ROOTS_VARIABLE, TOKEN_VARIABLE
from dissociated.node.launch import default_store, ensure, running

#: The write ends of pipes to nodes that this process started. They stay open until this process ends, because an unused
#: node ends with its starter.
_started: list[int] = []


def connect(
    catalog_uri: str | None = None,
    *,
    timeout: float = TIMEOUT,
    token: str | None = None,
    tls_roots: str | os.PathLike[str] | None = None,
    trusted_users: Sequence[str | int] = (),
    max_metadata: int = MAX_METADATA,
    trusted_files: bool = False,
    max_parallel: int = MAX_PARALLEL,
) -> Client:
    """Return a client of the catalog at `catalog_uri`. The first call of the client opens the connection.

    Without a URI, this is the catalog in the environment variable DISSOCIATED_CATALOG, or else the catalog of this
    user's node on this host. The node is started if it is not running. `dissociated status` and `dissociated stop` find
    the same node. A node that was started ends with the process that started it, unless something was published at it,
    or another client is connected. So a client of that node that was never called may find the node gone. Its first
    call then raises CatalogUnreachable, and `connect` starts the node again.

    Args:
        catalog_uri: grpc://HOST:PORT, grpc+tls://HOST:PORT for TLS, or grpc+unix:///DIR/FILE.sock; or None.
        timeout: Seconds for which the catalog, or a server, may be silent. Reading over grpc has no time limit, because
            the arrival of a partial batch cannot be observed there.
        token: Bearer token that is sent with each call. With the catalog in DISSOCIATED_CATALOG, the default is the
            environment variable DISSOCIATED_TOKEN.
        tls_roots: PEM file with the certificates to trust, for the catalog and for data over tls. None: the system's,
            or with the catalog in DISSOCIATED_CATALOG the file in DISSOCIATED_TLS_ROOTS.
        trusted_users: Names or ids of users whose servers' memory is mapped over shm, in addition to this user and
            root.
        trusted_files: Also map files of these users, who could truncate a file that this process reads. If False, the
            data in such files comes over another transport.
        max_parallel: Largest number of parts of a dataset that are opened at once over a network.
        max_metadata: Largest metadata of a message, in bytes. See `open_stream`. Over grpc, the schema and the metadata
            of batches are checked after they have arrived.

    Raises:
        UriError: The URI is invalid.
        StoreError: The node cannot be started.
        ForkedError: The process that forked this one has used gRPC.
        OptionError: An argument is invalid. The client's calls raise CatalogError, AccessDenied and DeadlineExceeded.

    Example:
        ```python
        import dissociated as dis

        with dis.connect("grpc://catalog.example:8815", timeout=30) as client:
            table = client.read("flights").read_all()
        ```
    """
    if catalog_uri is None:
        catalog_uri = os.environ.get(CATALOG_VARIABLE)
        if catalog_uri:
            # The credentials in the environment belong to this catalog, and are sent to no other.
            token = token or os.environ.get(TOKEN_VARIABLE) or None
            tls_roots = tls_roots or os.environ.get(ROOTS_VARIABLE) or None
        else:
            catalog_uri = local_catalog()
    return Client(catalog_uri, timeout, token, tls_roots, trusted_users, max_metadata, trusted_files, max_parallel)


def local_catalog() -> str:
    """Return the URI of the catalog of this user's node on this host, and start the node if it is not running.

    Raises:
        StoreError: The node cannot be started.
        ForkedError: The process that forked this one has used gRPC.
    """
    store = default_store()
    address = running(store)
    if address is not None:
        return address.uri
    read, write = os.pipe()
    try:
        address = ensure(store, starter=read)
    except BaseException:
        os.close(write)
        raise
    finally:
        os.close(read)
    _started.append(write)
    return address.uri
