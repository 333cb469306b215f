"""Where the catalog is, for the driver and for every task, and how long they wait for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dissociated.base.access import read_token
from dissociated.client.client import Client, connect
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded

T = TypeVar("T")

#: Where the catalog is, for whoever is not told otherwise.
VARIABLE = "DISSOCIATED_CATALOG"
_RETRY_TIMEOUT = 60.0  # seconds for a catalog that was killed to be there again
_CATALOG_RETRY_DELAY = 0.5


@dataclass(frozen=True)
class CatalogConfig:
    """How to reach the catalog, from the driver and from every task: so it names files, and holds no token."""

    uri: str
    token_file: str | None = None
    tls_roots: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> CatalogConfig:
        """From the options of a data source. Raises CatalogError where they do not say where the catalog is."""
        return cls(
            required(
                {"catalog": options.get("catalog") or os.environ.get(VARIABLE, "")},
                "catalog",
                'the catalog is: .option("catalog", "grpc://HOST:PORT"), the setting spark.dissociated.catalog, or '
                f"the variable {VARIABLE}",
            ),
            token_file=options.get("token_file"),
            tls_roots=options.get("tls_roots"),
        )

    def connect(self, uri: str | None = None) -> Client:
        """A client of the catalog, or of one of its nodes: close it after use. Raises what `dis.connect` does."""
        token = None if self.token_file is None else read_token(self.token_file)
        return connect(uri or self.uri, token=token, tls_roots=self.tls_roots)


def wait_for_catalog(call: Callable[[], T]) -> T:
    """What `call` gives. Where the catalog does not answer it, it is asked again, for a minute."""
    deadline = time.monotonic() + _RETRY_TIMEOUT
    while True:
        try:
            return call()
        except (CatalogUnreachable, DeadlineExceeded):
            if time.monotonic() >= deadline:
                raise
        time.sleep(_CATALOG_RETRY_DELAY)


def required(options: Mapping[str, str], key: str, advice: str) -> str:
    """The option `key`. Raises CatalogError, which begins "say where" and ends with `advice`, where it is not given."""
    if value := options.get(key):
        return str(value)
    if key == "path":
        advice += ". A table of Spark's own catalog has no place for that: CREATE TEMPORARY VIEW has, with OPTIONS"
    raise CatalogError(f"say where {advice}")
