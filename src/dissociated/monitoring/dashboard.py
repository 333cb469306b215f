"""A page for browsers that shows what a server does, and what it has done in the last minutes.

The files in `page/` are all of it: they load nothing from elsewhere, and ask for `/status.json` each second.
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

from dissociated.base.access import Security
from dissociated.errors import OptionError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.http import HttpService, Page, Response
from dissociated.monitoring.status import DatasetStatus, ServerStatus

_SAMPLE_INTERVAL = 1.0  # seconds
_SAMPLES = 300
_MAX_ENTRIES = 500  # datasets and consumers
_LARGEST_SHARE = 0.05  # of a core, for making the status; many datasets make it slow
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEALTH = "/healthz"


class Dashboard:
    """The page at http://HOST:PORT, given as `where`, with /status.json, /healthz and, where installed, /metrics.

    `status` says how it stands now, and `activity` counts what is sent. It keeps what was sent in each of the last 300
    seconds. Raises what HttpService does. Use `close` at its end.
    """

    def __init__(
        self, where: str, status: Callable[[], ServerStatus], activity: Activity, security: Security | None = None
    ) -> None:
        self._activity = activity
        self._status = Throttled(lambda: _shown(status()), _SAMPLE_INTERVAL / 2)
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES + 1)
        self._closed = threading.Event()
        pages = {path: _file(*what) for path, what in _FILES.items()}
        pages |= {"/status.json": self._json, HEALTH: self._health}
        try:
            from dissociated.monitoring.metrics import PATH, metrics_page

            pages[PATH] = metrics_page(status)
        except OptionError:
            pass  # the page does without prometheus_client
        self._http = HttpService(where, pages, "the page", security)
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
            self._samples.append((time.time(), self._activity.sent()))
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
        self._status()  # raises where the server cannot say how it is
        return Response("text/plain; charset=utf-8", b"ok\n")


class Throttled:
    """Calls `make` anew when its last answer is `age` seconds old, and old enough for what making it takes.

    Those who ask meanwhile get the last answer; those who ask at once wait for one.
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


def _shown(status: ServerStatus) -> dict[str, Any]:
    """The status, with those datasets and consumers that matter most, and how many there are."""
    datasets = sorted(status.datasets, key=_importance)[:_MAX_ENTRIES]
    consumers = sorted(status.consumers, key=lambda one: -one.bytes)[:_MAX_ENTRIES]
    return status.plain() | {
        "datasets": [vars(one) for one in datasets],
        "consumers": [vars(one) for one in consumers],
        "dataset_count": len(status.datasets),
        "consumer_count": len(status.consumers),
    }


def _importance(dataset: DatasetStatus) -> tuple[int, int, str]:
    return -dataset.consumers, -dataset.bytes, dataset.name


def _file(name: str, content_type: str) -> Page:
    content = resources.files(__package__).joinpath("page", name).read_bytes()
    return lambda headers: Response(content_type, content)
