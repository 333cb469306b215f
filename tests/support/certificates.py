"""TLS certificates that each run of the tests makes anew. They protect nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import trustme

_NAMES = "cert.pem", "key.pem", "roots.pem"


class Certificates(NamedTuple):
    """PEM files: the certificate that a server presents, and the root certificates that clients trust."""

    cert: str
    key: str
    roots: str

    @classmethod
    def beside(cls, roots: Path) -> Certificates:
        """Return the certificate that `certificates` issued for the server of these roots."""
        return cls(*(str(roots.with_name(name)) for name in _NAMES))

    @property
    def options(self) -> dict[str, Any]:
        """Return the TLS options of a `Server` with this certificate."""
        return {"tls_cert": self.cert, "tls_key": self.key}


def certificates(directory: Path, *hosts: str) -> Certificates:
    """Issue a certificate for `hosts` (default: the local host names) from a new certificate authority."""
    authority = trustme.CA()
    issued = authority.issue_cert(*(hosts or ("127.0.0.1", "::1", "localhost")))
    made = Certificates(*(str(directory / name) for name in _NAMES))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(made.cert, append=True)
    os.close(os.open(made.key, os.O_CREAT | os.O_WRONLY, 0o600))
    issued.private_key_pem.write_to_path(made.key)
    authority.cert_pem.write_to_path(made.roots)
    return made
