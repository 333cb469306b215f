"""Address of the catalog, for the driver and for every task, and how long they wait for an answer."""

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

#: Environment variable with the URI of the catalog. The option `catalog` wins over it.
VARIABLE = "DISSOCIATED_CATALOG"
_RETRY_TIMEOUT = 60.0  # seconds that a killed catalog has to start again
_CATALOG_RETRY_DELAY = 0.5


@dataclass(frozen=True)
class CatalogConfig:
    """Address and credentials of the catalog.

    The driver copies this object to every task. For this reason it names the token file and does not hold the token.
    """

    uri: str
    token_file: str | None = None
    tls_roots: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> CatalogConfig:
        """Parse the options of a data source.

        Raises:
            CatalogError: Neither the options nor the environment name the catalog.
        """
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
        """Connect to the catalog or, with `uri`, to a node of it.

        Returns:
            A client, which the caller closes after use.

        Raises:
            DissociatedError: The connection failed as `dis.connect` describes.
        """
        token = None if self.token_file is None else read_token(self.token_file)
        return connect(uri or self.uri, token=token, tls_roots=self.tls_roots)


def wait_for_catalog(call: Callable[[], T]) -> T:
    """Return the result of `call`, repeating the call for up to a minute while the catalog does not answer.

    Raises:
        CatalogUnreachable: The catalog did not answer within that minute.
        DeadlineExceeded: The last call took too long.
    """
    deadline = time.monotonic() + _RETRY_TIMEOUT
    while True:
        try:
            return call()
        except (CatalogUnreachable, DeadlineExceeded):
            if time.monotonic() >= deadline:
                raise
        time.sleep(_CATALOG_RETRY_DELAY)


def required(options: Mapping[str, str], key: str, advice: str) -> str:
    """Return the value of the option `key`.

    Raises:
        CatalogError: The option is missing. The message is "say where", followed by `advice`.
    """
    if value := options.get(key):
        return str(value)
    if key == "path":
        advice += ". A table of Spark's own catalog has no place for that: CREATE TEMPORARY VIEW has, with OPTIONS"
    raise CatalogError(f"say where {advice}")
