"""Where the catalog is, for the driver and for every task."""

from __future__ import annotations

from dataclasses import dataclass

from dissociated.access import read_token
from dissociated.catalog.reader import Client, connect


@dataclass(frozen=True)
class CatalogConfig:
    """How to reach the catalog, from the driver and from every task: so it names files, and holds no token."""

    uri: str
    token_file: str | None = None
    tls_roots: str | None = None

    def connect(self, uri: str | None = None) -> Client:
        """A client of the catalog, or of one of its nodes."""
        token = None if self.token_file is None else read_token(self.token_file)
        return connect(uri or self.uri, token=token, tls_roots=self.tls_roots)
