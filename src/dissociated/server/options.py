"""The options of a server: addresses, timeouts, limits on clients, and access."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from dissociated.control.access import Authorize, Owner, Security, security
from dissociated.server.admission import Limits

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ServerOptions(Limits):
    """The options of a `Server`. Times are in seconds, sizes in bytes.

    Addresses:

    - `listen`: URIs of transports. The server chooses missing parts, as in `shm:` and `tcp://127.0.0.1:0`. The
      parameter `advertise=HOST:PORT`, or `advertise=HOST`, says where clients reach the listener, if that differs: for
      example behind a container's port mapping. A URI of the catalog may have it, too.
    - `catalog`: the Arrow Flight URI that the catalog listens at. None for no catalog.
    - `advertise`: the host name in locations of listeners on all interfaces. Default: the name of this host.
    - `metrics`: HOST:PORT of an HTTP server with `/metrics` for Prometheus. It asks for no token.
    - `http`: HOST:PORT of an HTTP server with a page about the activity of the server, `/metrics` and `/healthz`. It
      asks for a token if `authorize` is set, and uses https if `tls_cert` is set.

    Timeouts:

    - `handshake_timeout`: limit for a client's request to arrive, handshake included.
    - `stall_timeout`: limit for a client that takes no bytes from its connection. For a part that waits because the
      client reads other parts first, `lease_timeout` is the limit.
    - `lease_timeout`: limit for a client that holds memory and sends no message.
    - `idle_timeout`: limit for a client that has read a stream and requests no other on the same connection.
    - `retain`: lifetime of the tickets that the catalog gives out. Datasets stay in memory for as long after they were
      replaced. Flight calls it the expiration time of endpoints. With 0, tickets have no guaranteed lifetime.

    Limits:

    - `max_connections`: largest number of clients that have sent their request.
    - `max_pending`: largest number of clients that have sent no request yet. Further clients wait; after a second, the
      oldest client without a request is disconnected to make room.
    - `max_idle`: largest number of clients that have read a stream and may request another on the same connection.
      Beyond it, the client that has been idle for longest is disconnected. With 0, a connection carries one stream.
    - `live_limit`: largest number of bytes of a live stream in shared memory, for each client, or for all clients
      together if they share one reading.
    - `kept_limit`: largest number of bytes that slow clients may still hold together after they were cut off, of live
      streams and of datasets that were replaced or dropped. Beyond it, no new client may read over shared memory.
      Default: four times `live_limit` for live streams, and no limit for other datasets.
    - `inline_limit`: bodies of up to this size are sent inline even if they could be shared. Default: 16 KiB for live
      streams, and 0 for static datasets.
    - `max_metadata`: largest size of the metadata of one message, usually that of the schema. A dataset that exceeds it
      is not published. Clients have the same limit unless they set another.

    Access (see docs/access.md):

    - `ticket_lifetime`: if set, tickets are signed and expire after this many seconds.
    - `secret`: the key that signs tickets. Servers with the same key accept each other's tickets for datasets that
      were published with the same `ticket`.
    - `authorize`: guards the catalog. It is a collection of tokens, or a callable that takes a token and returns its
      owner's name or True to accept it, and a false value to reject it.
    - `tls_cert`, `tls_key`: PEM files for a catalog at `grpc+tls:` and for listeners at `tls:`.
    - `allow_rma`: lets clients over `ucx:` and `fabric:` fetch bodies from this process's memory. UCX then lets every
      client that connects read and write all memory of this process; libfabric lets it read published memory only. Set
      it only on networks and for peers that you trust.

    Work for clients:

    - `choose_rows`: apply clients' filters and limits in the server, on transports that send bodies instead of sharing
      memory. This takes time of this process, but fewer bytes are sent. Without it, clients receive all rows and
      filter them.

    Example:
        ```python
        import dissociated as dis

        options = dis.ServerOptions(["tcp://127.0.0.1:0"], max_connections=100, retain=60)
        with dis.Server.of(options) as server:
            server.publish("flights", table)
        ```
    """

    listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0")
    _: KW_ONLY
    catalog: str | None = "grpc://127.0.0.1:0"
    retain: float = 0.0
    advertise: str | None = None
    allow_rma: bool = False
    ticket_lifetime: float | None = None
    secret: bytes | None = field(default=None, repr=False)
    authorize: Authorize | Iterable[str] | Mapping[str, Owner] | None = field(default=None, repr=False)
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    metrics: str | None = None
    http: str | None = None
    choose_rows: bool = True

    def security(self) -> Security:
        """Build the access rules. If `secret` is not set, each call draws a new random one."""
        return security(
            ticket_lifetime=self.ticket_lifetime,
            secret=self.secret,
            authorize=self.authorize,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )


def takes_fields(options: Callable[P, T]) -> Callable[[Callable[[Any, T], None]], Callable[Concatenate[Any, P], None]]:
    """Decorate an `__init__` that takes one `options` object, so that callers pass its fields as arguments."""

    def decorate(init: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(init)
        def init_from_fields(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, options(*args, **kwargs))

        signature, fields = inspect.signature(init), inspect.signature(options).parameters
        self_parameter, *_ = signature.parameters.values()
        init_from_fields.__signature__ = signature.replace(parameters=[self_parameter, *fields.values()])  # type: ignore[attr-defined]
        return init_from_fields

    return decorate
