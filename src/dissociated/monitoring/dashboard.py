"""A web page that shows the present activity of a server, and that of the last minutes.

The page consists of the files in `page/`. It loads nothing from other servers, and requests `/status.json` each second.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from email.message import Message
from importlib import resources
from typing import Any

from dissociated.control.access import Security
from dissociated.errors import OptionError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.http import HttpService, Page, Response
from dissociated.monitoring.status import DatasetStatus, ServerStatus

_SAMPLE_INTERVAL = 1.0  # seconds
_SAMPLES = 300
_MAX_ENTRIES = 500  # of datasets, and of consumers
_LARGEST_SHARE = 0.05  # the maximum share of a core for computing the status, which is slow if there are many datasets
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEALTH = "/healthz"


class Dashboard:
    """An HTTP server for the page, /status.json, /healthz and, if prometheus_client is installed, /metrics.

    It records the number of bytes sent in each of the last 300 seconds. Call `close` at the end.

    Args:
        address: The address to listen at, as HOST:PORT.
        status: A function that returns the present status of the server.
        activity: The statistics of the server.
        security: The tokens and the certificate of the server; None for an open page over plain HTTP.

    Raises:
        OptionError: `address` is invalid.
        TransportError: The page cannot listen.
    """

    def __init__(
        self, address: str, status: Callable[[], ServerStatus], activity: Activity, security: Security | None = None
    ) -> None:
        self._activity = activity
        self._status = Throttled(lambda: _limited_status(status()), _SAMPLE_INTERVAL / 2)
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES + 1)
        self._closed = threading.Event()
        pages = {path: _file(*file) for path, file in _FILES.items()}
        pages |= {"/status.json": self._json, HEALTH: self._health}
        try:
            from dissociated.monitoring.metrics import PATH, metrics_page

            pages[PATH] = metrics_page(status)
        except OptionError:
            pass  # Without prometheus_client there is no page /metrics.
        self._http = HttpService(address, pages, "the page", security)
        self.uri = self._http.uri
        self._sampler = threading.Thread(target=self._sample, name="page samples", daemon=True)
        self._sampler.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        self._http.close()
        self._sampler.join()

    def _sample(self) -> None:
        while True:
            self._samples.append((time.time(), self._activity.bytes_sent()))
            if self._closed.wait(_SAMPLE_INTERVAL):
                return

    def _json(self, headers: Message) -> Response:
        plain = self._status() | {
            "now": time.time(),
            "samples": list(self._samples),
            "changes": [{"time": when, **vars(change)} for when, change in self._activity.changes.latest()],
        }
        return Response("application/json", json.dumps(plain).encode())

    def _health(self, headers: Message) -> Response:
        self._status()  # Raise if the status cannot be computed.
        return Response("text/plain; charset=utf-8", b"ok\n")


class Throttled:
    """A cache for the result of `make`, which is called again when the result is old enough.

    The minimum age is `age` seconds, or more if `make` is slow. Callers that come meanwhile get the last result.
    Callers that come during a call of `make` wait for its result.
    """

    def __init__(self, make: Callable[[], dict[str, Any]], age: float) -> None:
        self._make, self._age = make, age
        self._lock = threading.Lock()
        self._last: dict[str, Any] = {}
        self._good_until = 0.0

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            started = time.monotonic()
            if started >= self._good_until:
                self._last = self._make()
                now = time.monotonic()
                self._good_until = now + max(self._age, (now - started) / _LARGEST_SHARE)
            return self._last


def _limited_status(status: ServerStatus) -> dict[str, Any]:
    """Return the status as JSON, limited to the most important datasets and consumers, with the number of all."""
    datasets = sorted(status.datasets, key=_importance)[:_MAX_ENTRIES]
    consumers = sorted(status.consumers, key=lambda consumer: -consumer.bytes)[:_MAX_ENTRIES]
    return status.plain() | {
        "datasets": [vars(dataset) for dataset in datasets],
        "consumers": [vars(consumer) for consumer in consumers],
        "dataset_count": len(status.datasets),
        "consumer_count": len(status.consumers),
    }


def _importance(dataset: DatasetStatus) -> tuple[int, int, str]:
    return -dataset.consumers, -dataset.bytes, dataset.name


def _file(name: str, content_type: str) -> Page:
    content = resources.files(__package__).joinpath("page", name).read_bytes()
    return lambda headers: Response(content_type, content)
