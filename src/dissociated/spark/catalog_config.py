"""Address of the catalog, for the driver and for every task, and how long they wait for an answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from dissociated.base.tracing import TRACEPARENT, is_traceparent
from dissociated.client.client import Client
from dissociated.client.flight_connection import token_for
from dissociated.client.request import TIMEOUT
from dissociated.control.access import read_token
from dissociated.control.catalog_uri import CATALOG_VARIABLE
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded, NodeUnreachable, OptionError
from dissociated.node.client import connect
from dissociated.node.launch import ensure
from dissociated.node.local import EMPTY_EXIT

P = ParamSpec("P")
T = TypeVar("T")

#: The seconds for which tasks wait for a catalog or a node that is away, unless an option says otherwise. Start and
#: abort included, a job then fails within a minute.
WAIT = 50.0
_MAX_WAIT = 86_400.0
RETRY_DELAY = 0.5  # seconds between two attempts
#: For each catalog that does not answer, by URI: the times of the first and the last failure.
_failures: dict[str, tuple[float, float]] = {}


@dataclass(frozen=True)
class CatalogConfig:
    """Address and credentials of the catalog.

    The driver copies this object to every task. For this reason it names the token file and does not hold the token.
    """

    uri: str
    token_file: str | None = None
    tls_roots: str | None = None
    #: The seconds for which a call is repeated while the catalog or a node does not answer.
    wait: float = WAIT
    #: The trace that calls and reads belong to.
    traceparent: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> CatalogConfig:
        """Parse the options of a data source.

        If neither they nor the environment name the catalog, it is that of this user's node on the host of the driver,
        which is started if it is not running.

        Raises:
            StoreError: The node cannot be started.
            OptionError: The option `wait` or `traceparent` is invalid.
        """
        return cls(
            options.get("catalog") or os.environ.get(CATALOG_VARIABLE) or ensure(empty_exit=EMPTY_EXIT).uri,
            token_file=options.get("token_file"),
            tls_roots=options.get("tls_roots"),
            wait=_parse_wait(options.get("wait")),
            traceparent=_parse_traceparent(options.get(TRACEPARENT)),
        )

    def connect(self, uri: str | None = None, timeout: float = TIMEOUT) -> Client:
        """Connect to the catalog or, with `uri`, to a node that it names. See `token_for`.

        Returns:
            A client, which the caller closes after use.

        Raises:
            DissociatedError: The connection failed as `dis.connect` describes.
        """
        token = None if self.token_file is None else read_token(self.token_file)
        uri = uri or self.uri
        client = connect(uri, timeout=timeout, token=token_for(uri, self.uri, token), tls_roots=self.tls_roots)
        client.join_trace(self.traceparent)
        return client

    def retry(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, repeated for `wait` seconds while the catalog or a node does not answer.

        For a catalog, these seconds begin with the first failure of any such call in this process. So if the catalog is
        gone for good, the further attempts of a task, and the abort after them, do not wait as long again.

        Raises:
            CatalogUnreachable, NodeUnreachable: The catalog, or a node that `call` needs, did not answer in that time.
            DeadlineExceeded: The last call took too long.
        """
        started = time.monotonic()
        while True:
            try:
                result = call()
            except CatalogUnreachable:
                if time.monotonic() - min(started, _first_failure(self.uri)) >= self.wait:
                    raise
            except (NodeUnreachable, DeadlineExceeded):
                if time.monotonic() - started >= self.wait:
                    raise
            else:
                _failures.pop(self.uri, None)
                return result
            time.sleep(RETRY_DELAY)

    def retrying(self, call: Callable[P, T]) -> Callable[P, T]:
        """Return a function that makes `call` as `retry` does."""
        return lambda *args, **options: self.retry(lambda: call(*args, **options))

    def ask(self, call: Callable[[Client], T]) -> T:
        """Return the result of `call` with a client of the catalog, repeated as `retry` does."""

        def once() -> T:
            with self.connect() as client:
                return call(client)

        return self.retry(once)


def _first_failure(uri: str) -> float:
    """Record that the catalog does not answer. Return the time since when it has not answered any call."""
    now = time.monotonic()
    first, last = _failures.get(uri, (now, now))
    if now - last > WAIT:
        first = now  # No call has failed for so long that the earlier outage was probably another one.
    _failures[uri] = first, now
    return first


def _parse_wait(text: str | None) -> float:
    try:
        wait = WAIT if text is None else float(text)
    except ValueError:
        wait = -1.0
    if not 0 <= wait <= _MAX_WAIT:
        raise OptionError(f"the option wait is a number of seconds from 0 to {_MAX_WAIT:g}, not {text!r}")
    return wait


def _parse_traceparent(text: str | None) -> str | None:
    if text is not None and not is_traceparent(text):
        raise OptionError(f"the option {TRACEPARENT} is a trace context of W3C, 00-TRACE-SPAN-FLAGS, not {text!r}")
    return text


def required_name(options: Mapping[str, str], method: str) -> str:
    """Return the name of the dataset, which is the option `path`.

    Args:
        options: The options.
        method: The call of Spark by which the user gives the name, for the message.

    Raises:
        CatalogError: The option is missing.
    """
    if name := options.get("path"):
        return str(name)
    raise CatalogError(
        f"the name of the dataset is missing: give it in {method}, or in SQL by CREATE TEMPORARY VIEW with OPTIONS "
        "(path 'NAME'), since a table of Spark's own catalog cannot name a dataset"
    )
