"""The HTTP pages of a server: its metrics, and the dashboard for browsers."""

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
    """The HTTP pages of one server. Each exists only after `open`. Call `close` after use."""

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
        """Start the HTTP servers.

        Args:
            metrics: HOST:PORT for the metrics; None for no metrics.
            http: HOST:PORT for the dashboard; None for no dashboard.
            status: returns the status that the pages show.
            activity: the counters of the server.
            security: the access rules of the dashboard.

        Raises:
            UriError: if an address is invalid.
            TransportError: if an address cannot be listened at.
        """
        if metrics is not None:
            from dissociated.monitoring.metrics import metrics_service

            self._metrics = metrics_service(metrics, status)
        if http is not None:
            from dissociated.monitoring.dashboard import Dashboard

            self._dashboard = Dashboard(http, status, activity, security)

    @property
    def metrics_uri(self) -> str:
        """The URI of the metrics. Raises DissociatedError if the server has none."""
        if self._metrics is None:
            raise DissociatedError("this server was made without metrics")
        return f"{self._metrics.uri}/metrics"

    @property
    def http_uri(self) -> str:
        """The URI of the dashboard. Raises DissociatedError if the server has none."""
        if self._dashboard is None:
            raise DissociatedError("this server was made without http")
        return self._dashboard.uri

    def close(self) -> None:
        """Stop the HTTP servers."""
        for page in (self._metrics, self._dashboard):
            if page is not None:
                page.close()
