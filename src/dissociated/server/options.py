"""How a server is: what it listens at, how long it waits, what it takes and keeps, and who may read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from dissociated.base.access import Authorize, Owner, Security, security
from dissociated.base.buffers import MAX_METADATA
from dissociated.errors import OptionError
from dissociated.server.admission import Limits
from dissociated.transport.base import check_timeout

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ServerOptions:
    """What a `Server` takes. Times are in seconds, sizes in bytes.

    What it listens at:

    - `listen`: URIs of transports. Parts that are left out are chosen: `shm:`, `tcp://127.0.0.1:0`.
    - `catalog`: where the catalog, Arrow Flight, listens. None for no catalog.
    - `advertise`: the host that locations name where the server listens on all interfaces. Left out: this host's name.
    - `metrics`: HOST:PORT. Whoever reaches it can ask for /metrics, as Prometheus does.
    - `http`: HOST:PORT of a page for browsers that shows what the server does, with /metrics and /healthz beside it. It
      asks for a token where there is `authorize`, and is at https where there is `tls_cert`.

    How long it waits:

    - `handshake_timeout`: for a client's request, whatever arrives before that.
    - `stall_timeout`: for a client that takes nothing.
    - `lease_timeout`: for a client that holds memory and says nothing.
    - `retain`: how long tickets that the catalog gives out stay good, and so how long their datasets stay in memory
      after they have been replaced. Flight knows it as the expiration time of endpoints. With 0 nothing is promised.

    What it takes and keeps at most:

    - `max_connections`: clients that have sent their request.
    - `max_asking`: clients that have not. Where more come, they wait; after a second the oldest of those is closed.
    - `live_limit`: bytes of a live stream that may be held in shared memory: by one client, or by all that share it.
    - `kept_limit`: bytes that clients who were cut off for being slow may still hold together, of live streams and of
      what was replaced or dropped. Beyond it, nobody new may read over shared memory. Left out: four times `live_limit`
      for live streams, and none for the rest, which is what was published.
    - `inline_limit`: bodies of up to this size are sent inline where they could be shared. Left out: 16 KiB for live
      streams, and none for static datasets.
    - `max_metadata`: the longest metadata of one message, a schema above all. What has more is not published. Clients
      take no more either, unless they say so.

    Who may read (see docs/access.md):

    - `ticket_lifetime`: tickets are signed, and expire after so many seconds.
    - `secret`: servers with the same one accept each other's signed tickets for what was published with one `ticket`.
    - `authorize`: guards the catalog. It is tokens, or a callable that is given a token and returns its owner's name
      or True, or something false.
    - `tls_cert`, `tls_key`: PEM files for a catalog at grpc+tls: and for listeners of tls:.
    - `allow_rma`: clients over `ucx:` and `fabric:` that ask for it fetch bodies from this process's memory. UCX then
      lets every client that connects read and write all of that memory; libfabric lets it read what is published. Only
      for networks and peers you trust.

    What it does for clients:

    - `choose_rows`: filters and limits that clients ask for are applied here, where bodies travel: that takes this
      process's time, and spares bytes. Without it, clients get everything and choose.
    """

    listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0")
    _: KW_ONLY
    catalog: str | None = "grpc://127.0.0.1:0"
    retain: float = 0.0
    handshake_timeout: float = 10.0
    stall_timeout: float = 300.0
    lease_timeout: float = 86_400.0
    live_limit: int = 1 << 28
    kept_limit: int | None = None
    inline_limit: int | None = None
    max_metadata: int = MAX_METADATA
    max_connections: int = 1024
    max_asking: int = 128
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

    @property
    def limits(self) -> Limits:
        """What one client may take. Raises OptionError."""
        if self.max_asking < 1:
            raise OptionError(f"max_asking is 1 or more, not {self.max_asking}: nobody could ask for anything")
        return Limits(
            check_timeout(self.handshake_timeout),
            check_timeout(self.stall_timeout),
            check_timeout(self.lease_timeout),
            self.live_limit,
            self.kept_limit,
            self.inline_limit,
            self.max_metadata,
            self.max_connections,
            self.max_asking,
        )

    def security(self) -> Security:
        """Who may read; a secret that nobody gave is another each time."""
        return security(
            ticket_lifetime=self.ticket_lifetime,
            secret=self.secret,
            authorize=self.authorize,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )


def takes(options: Callable[P, T]) -> Callable[[Callable[[Any, T], None]], Callable[Concatenate[Any, P], None]]:
    """An `__init__` of `options` that takes what makes these."""

    def decorate(init: Callable[[Any, T], None]) -> Callable[Concatenate[Any, P], None]:
        @wraps(init)
        def taking(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, options(*args, **kwargs))

        ours, theirs = inspect.signature(init), inspect.signature(options)
        first, *_ = ours.parameters.values()
        taking.__signature__ = ours.replace(parameters=[first, *theirs.parameters.values()])  # type: ignore[attr-defined]
        return taking

    return decorate
