"""A small read-only HTTP server for the people and programs that monitor a server.

It limits the number of requests and their duration, since a process that serves data must keep its file descriptors for
its consumers. docs/architecture.md compares it with maintained servers, which have no such limits.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from dissociated.base.fork import ProcessBound
from dissociated.base.host import is_loopback
from dissociated.control.access import Authorize, Security, identify
from dissociated.control.roles import PAGES, Role
from dissociated.errors import OptionError, TransportError
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

_REQUEST_TIMEOUT = 10.0  # seconds in which a client must send more of its request, or take more of the response
_MAX_REQUESTS = 8  # at the same time
#: Seconds that each request may take, however many clients connect.
LEAST_TIME = 0.5
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Response(NamedTuple):
    """The response to one request."""

    content_type: str
    content: bytes
    status: int = 200


#: A function that returns the response to a request, given the headers of the request.
Page: TypeAlias = Callable[[Message], Response]


class HttpService(ProcessBound):
    """An HTTP server that answers GET requests for a set of pages. It may be closed while it answers requests.

    If `security` has tokens, a request needs a token with the role that `dissociated.control.roles.PAGES` has for the
    page. The token is a bearer token, or the password of HTTP basic authentication, which browsers ask their users for.

    Args:
        address: The address to listen at, as HOST:PORT. With port 0, the system chooses a free port.
        pages: The pages by their paths.
        service: The purpose of the server, for error messages.
        security: The tokens to check, and a certificate, with which the server uses HTTPS.

    Raises:
        OptionError: `address` is invalid.
        TransportError: The server cannot listen.
    """

    def __init__(
        self,
        address: str,
        pages: Mapping[str, Page],
        service: str,
        security: Security | None = None,
    ) -> None:
        security = security or Security()
        place = Uri.parse(f"http://{address}")
        if not place.host or place.port is None or place != Uri("http", place.host, place.port):
            raise OptionError(f"{address!r} is not an address for {service}: give HOST:PORT")
        try:
            self._http = _Http((place.host, place.port), pages, security)
        except OSError as error:
            raise TransportError(f"cannot listen on {address!r} for {service}: {error.strerror or error}") from None
        host = f"[{place.host}]" if ":" in place.host else place.host
        scheme = "http" if security.certificate is None else "https"
        #: The URI of the server: http://HOST:PORT or https://HOST:PORT, without a path.
        self.uri = f"{scheme}://{host}:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, name=service, daemon=True)
        self._thread.start()
        self.bind_to_process()

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def after_fork_in_child(self) -> None:
        """Close the listening socket. See `dissociated.base.fork`."""
        self._http.socket.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # connections that are not yet accepted

    def __init__(self, address: tuple[str, int], pages: Mapping[str, Page], security: Security) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self.authorize = security.authorize
        self._tls: ssl.SSLContext | None = None
        if security.certificate is not None:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*security.certificate)
        self._lock = threading.Condition()
        self._requests: dict[socket.socket, float] = {}  # the start of each request, oldest first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # The method of HTTPServer would look up the host's name, which may take long.
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a new thread. At the limit, wait for a request to end, or close the oldest request.

        Each request has at least `LEAST_TIME`. Otherwise, clients that reconnect as soon as they are closed would
        leave no time for others.
        """
        with self._lock:
            while len(self._requests) >= _MAX_REQUESTS:
                oldest, since = next(iter(self._requests.items()))
                remaining = since + LEAST_TIME - time.monotonic()
                if remaining > 0:
                    self._lock.wait(remaining)
                    continue
                del self._requests[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._requests[request] = time.monotonic()
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_REQUEST_TIMEOUT)
            if self._tls is None:
                super().finish_request(request, client_address)
                return
            duplicate = request.dup()  # `request` must stay valid, since `process_request` may shut it down.
            with self._tls.wrap_socket(duplicate, server_side=True) as secured:
                super().finish_request(secured, client_address)
        finally:
            with self._lock:
                self._requests.pop(request, None)
                self._lock.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a client disconnected early, or did not send HTTP."""
        _log.debug("request ended early", exc_info=True)

    def accepts_host(self, host: str) -> bool:
        """Return whether a request may name this host.

        The check stops DNS rebinding: a web page that resolves its own name to 127.0.0.1 could read these pages.
        """
        if self.authorize is not None or not is_loopback(str(self.server_address[0])):
            return True
        try:
            return is_loopback(urlsplit(f"//{host}").hostname or "")
        except ValueError:
            return False


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_TIMEOUT
    server: _Http

    def do_GET(self) -> None:  # the name that http.server requires
        path = self.path.partition("?")[0]
        page = self.server.pages.get(path)
        try:
            if page is None:
                response = _plain(404, f"the path does not exist: the paths are {', '.join(sorted(self.server.pages))}")
            elif not self.server.accepts_host(self.headers.get("Host", "")):
                response = _plain(421, "the Host header names another host: use 127.0.0.1 or localhost")
            else:
                needed = PAGES.get(path, Role.ADMIN)
                role = _role(self.server.authorize, self.headers.get("Authorization", ""))
                if needed is None:
                    response = page(self.headers)
                elif role is None:
                    response = _plain(
                        401, "a token of the catalog is required: give it as a bearer token or as the password"
                    )
                elif role < needed:
                    response = _plain(403, f"a token of the role {needed} is required; this token has the role {role}")
                else:
                    response = page(self.headers)
        except Exception:
            _log.exception("request failed: path=%s", path)
            response = _plain(500, "the request failed: see the log of the server")
        self._send(response)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        headers = {**_HEADERS, "Content-Type": response.content_type, "Content-Length": str(len(response.content))}
        if response.status == 401:
            headers["WWW-Authenticate"] = 'Basic realm="dissociated: any name, and a token as the password"'
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.content)

    def version_string(self) -> str:
        return "dissociated"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def _plain(status: int, text: str) -> Response:
    return Response("text/plain; charset=utf-8", f"{text}\n".encode(), status)


def _role(authorize: Authorize | None, header: str) -> Role | None:
    """Return the role of the token in an authorization header; None if there is no token, or an unknown one."""
    if authorize is None:
        return Role.PEER
    scheme, _, credentials = header.partition(" ")
    token = credentials.strip()
    if scheme.lower() == "basic":
        try:
            token = base64.b64decode(token, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeError):
            return None
    elif scheme.lower() != "bearer":
        return None
    try:
        owner = identify(authorize, token) if token else None
        return None if owner is None else owner.role
    except OptionError as error:
        _log.error("token check failed: error=%s", str(error))
        return None
