"""/metrics for Prometheus: what `Server.status` says, at the moment it is asked. Needs the extra `metrics`.

What is answered is prometheus_client's. The HTTP server is not: its `start_http_server` has neither a deadline nor a
limit. Of 500 clients that connected and said nothing, each had a thread after one second and after 15 (version 0.26).
Here 8 had one, and after 15 seconds none. A process that serves data has to keep its descriptors for its consumers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

from dissociated.errors import OptionError, TransportError
from dissociated.fork import bind_to_process, invalidate
from dissociated.monitoring.status import OUTCOMES, ServerStatus
from dissociated.uri import Uri

_TIMEOUT = 10.0  # seconds for somebody to ask, and to take the answer
_MAX_ASKING = 8  # at once


class MetricsService:
    """Answers at http://HOST:PORT/metrics, given as HOST:PORT; port 0 is one that is free.

    Raises OptionError where that is no place or prometheus_client is not installed, and TransportError where it cannot
    listen.
    """

    def __init__(self, where: str, status: Callable[[], ServerStatus]) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise OptionError("metrics need prometheus_client: pip install 'dissociated[metrics]'") from None
        place = Uri.parse(f"http://{where}")
        if not place.host or place.port is None or place != Uri("http", place.host, place.port):
            raise OptionError(f"{where!r} is no place for metrics: HOST:PORT")
        registry = prometheus_client.CollectorRegistry()
        registry.register(_Collector(status))
        try:
            self._http = _Http((place.host, place.port), registry)
        except OSError as error:
            raise TransportError(f"cannot listen on {where} for metrics: {error.strerror or error}") from None
        host = f"[{place.host}]" if ":" in place.host else place.host
        self.uri = f"http://{host}:{self._http.server_port}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        bind_to_process(self)

    def close(self) -> None:
        """Stop answering."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def forked(self) -> None:
        self._http.socket.close()
        invalidate(self)


class _Collector:
    def __init__(self, status: Callable[[], ServerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Any]:
        return []  # so that nobody asks for values to learn the names

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._status()

        def family(kind: Any, name: str, text: str, labels: list[str], *values: tuple[list[str], float | None]) -> Any:
            made = kind(f"dissociated_{name}", text, labels=labels)
            for label, value in values:
                if value is not None:
                    made.add_metric(label, value)
            return made

        totals = vars(now.totals)
        yield family(GaugeMetricFamily, "uptime_seconds", "Since the server began", [], ([], now.seconds))
        yield family(GaugeMetricFamily, "leases", "Addresses that consumers hold", [], ([], now.leases))
        text = "Bytes of live streams that consumers hold who were cut off"
        yield family(GaugeMetricFamily, "kept_bytes", text, [], ([], now.kept))
        if now.store is not None:
            for name, text, value in (
                ("store_bytes", "What the store of this node holds", now.store.held),
                ("store_limit_bytes", "What it may hold, if it is limited", now.store.limit),
            ):
                yield family(GaugeMetricFamily, name, text, [], ([], value))
        for field, name, text in (
            ("streams", "streams", "Streams that were asked for"),
            ("messages", "sent_messages", "Messages sent"),
            ("bytes", "sent_bytes", "Bytes of bodies sent, inline or by address"),
            ("flight", "flight_streams", "Streams over Flight's DoGet, which the others do not count"),
        ):
            yield family(CounterMetricFamily, name, text, [], ([], totals[field]))
        ended = [([outcome], totals[outcome]) for outcome in OUTCOMES]
        yield family(CounterMetricFamily, "connections_ended", "By how they ended", ["outcome"], *ended)
        changed = [([kind], count) for kind, count in vars(now.changed).items()]
        text = "Versions of datasets that were committed here, and what became of them"
        yield family(CounterMetricFamily, "dataset_versions", text, ["change"], *changed)
        for kind, field, name, text in (
            (GaugeMetricFamily, "open", "connections_open", "Connections that are open"),
            (CounterMetricFamily, "accepted", "connections_accepted", "All connections there have been"),
            (CounterMetricFamily, "refused", "connections_refused", "Of these, turned away: there were too many"),
        ):
            values = [([one.uri], getattr(one, field)) for one in now.listeners]
            yield family(kind, name, text, ["listener"], *values)
        for kind, field, name, text in (
            (GaugeMetricFamily, "rows", "rows", "Rows, where known"),
            (GaugeMetricFamily, "size", "size_bytes", "Bytes of all bodies, where known"),
            (GaugeMetricFamily, "consumers", "consumers", "Streams that are open"),
            (GaugeMetricFamily, "leases", "leases", "Addresses that consumers hold"),
            (CounterMetricFamily, "streams", "streams", "Streams that were asked for since it was published"),
            (CounterMetricFamily, "messages", "sent_messages", "Messages sent since it was published"),
            (CounterMetricFamily, "bytes", "sent_bytes", "Bytes of bodies sent since it was published"),
        ):
            values = [([one.name], getattr(one, field)) for one in now.datasets]
            yield family(kind, f"dataset_{name}", text, ["dataset"], *values)


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], registry: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.registry = registry
        self._places = threading.BoundedSemaphore(_MAX_ASKING)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own would look the host's name up, which may take long
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # whoever asked has gone


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT
    server: _Http

    def do_GET(self) -> None:  # http.server's name
        from prometheus_client.exposition import choose_encoder

        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, explain="there is /metrics alone")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        content = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
