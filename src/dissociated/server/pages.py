"""What a server shows over HTTP: metrics, and a page for browsers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dissociated.base.access import Security
from dissociated.errors import DissociatedError
from dissociated.monitoring.activity import Activity
from dissociated.monitoring.status import ServerStatus

if TYPE_CHECKING:
    from dissociated.monitoring.dashboard import Dashboard
    from dissociated.monitoring.http import HttpService


class Pages:
    """Those of one server, each once it is opened. `close` them after use."""

    def __init__(self) -> None:
        self._metrics: HttpService | None = None
        self._dashboard: Dashboard | None = None

    def open(
        self,
        metrics: str | None,
        http: str | None,
        status: Callable[[], ServerStatus],
        activity: Activity,
        security: Security,
    ) -> None:
        """Answer at these places, HOST:PORT each; None for not at all. Raises UriError and TransportError."""
        if metrics is not None:
            from dissociated.monitoring.metrics import metrics_service

            self._metrics = metrics_service(metrics, status)
        if http is not None:
            from dissociated.monitoring.dashboard import Dashboard

            self._dashboard = Dashboard(http, status, activity, security)

    @property
    def metrics_uri(self) -> str:
        """Where metrics are. Raises DissociatedError where there are none."""
        if self._metrics is None:
            raise DissociatedError("this server was made without metrics")
        return f"{self._metrics.uri}/metrics"

    @property
    def http_uri(self) -> str:
        """Where the page is. Raises DissociatedError where there is none."""
        if self._dashboard is None:
            raise DissociatedError("this server was made without http")
        return self._dashboard.uri

    def close(self) -> None:
        """Answer no more."""
        for page in (self._metrics, self._dashboard):
            if page is not None:
                page.close()
