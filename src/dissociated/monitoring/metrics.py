"""Metrics for Prometheus at /metrics, computed from `Server.status` for each request. They need the extra `metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any

from dissociated.errors import OptionError
from dissociated.monitoring.http import HttpService, Page, Response
from dissociated.monitoring.status import OUTCOMES, ServerStatus

PATH = "/metrics"


def metrics_service(address: str, status: Callable[[], ServerStatus]) -> HttpService:
    """Serve http://HOST:PORT/metrics and no other page.

    Args:
        address: The address to listen at, as HOST:PORT.
        status: A function that returns the present status of the server.

    Raises:
        OptionError: `address` is invalid, or prometheus_client is not installed.
        TransportError: The server cannot listen.
    """
    return HttpService(address, {PATH: metrics_page(status)}, "metrics")


def metrics_page(status: Callable[[], ServerStatus]) -> Page:
    """Return the page for Prometheus. Raise OptionError if prometheus_client is not installed."""
    try:
        import prometheus_client
        from prometheus_client.exposition import choose_encoder
    except ImportError:
        raise OptionError("metrics need prometheus_client: pip install 'dissociated[metrics]'") from None
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Collector(status))

    def page(headers: Message) -> Response:
        encode, content_type = choose_encoder(headers.get("Accept", ""))
        return Response(content_type, encode(registry))

    return page


class _Collector:
    def __init__(self, status: Callable[[], ServerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Any]:
        return []  # an empty list, so that the registry does not call `collect` to learn the names

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._status()

        def family(kind: Any, name: str, text: str, labels: list[str], *values: tuple[list[str], float | None]) -> Any:
            family = kind(f"dissociated_{name}", text, labels=labels)
            for label, value in values:
                if value is not None:
                    family.add_metric(label, value)
            return family

        totals = vars(now.totals)
        yield family(GaugeMetricFamily, "uptime_seconds", "Seconds since the server started", [], ([], now.seconds))
        yield family(GaugeMetricFamily, "leases", "Messages, or addresses, that consumers hold", [], ([], now.leases))
        text = "Bytes held by consumers that were cut off, or of datasets that are no longer served"
        yield family(GaugeMetricFamily, "kept_bytes", text, [], ([], now.kept))
        if now.store is not None:
            for name, text, value in (
                ("store_bytes", "Bytes in the store of this node", now.store.held),
                ("store_limit_bytes", "Limit of the store in bytes, if there is one", now.store.limit),
                ("store_free_bytes", "Free bytes in the file system of the store", now.store.free),
                ("store_room_bytes", "Bytes that the store can still take", now.store.room),
                (
                    "store_set_aside",
                    "Entries of the store that cannot be read, or that the catalog does not list",
                    len(now.store.set_aside),
                ),
            ):
                yield family(GaugeMetricFamily, name, text, [], ([], value))
        if now.nodes:
            for field, name, text in (
                ("alive", "node_alive", "Whether the heartbeats of a node are on time"),
                ("registered", "node_registered", "Whether the catalog uses a node, or has refused it"),
                ("seconds", "node_heartbeat_age_seconds", "Seconds since the last heartbeat of a node"),
                ("clock", "node_clock_ahead_seconds", "Seconds by which a node's clock is ahead of the catalog"),
            ):
                nodes = [([node.host, node.catalog], float(getattr(node, field))) for node in now.nodes]
                yield family(GaugeMetricFamily, name, text, ["host", "node"], *nodes)
        text = "Parts of current versions that cannot be read, because nodes are away or have set them aside"
        yield family(GaugeMetricFamily, "unreadable_parts", text, [], ([], now.unreadable_parts))
        text = "Whether the last report of this node to its catalog failed"
        yield family(GaugeMetricFamily, "report_failed", text, [], ([], float(bool(now.problem))))
        for field, name, text in (
            ("refused_puts", "refused_puts", "Puts, reservations of room and commits that ended with an error"),
            ("streams", "streams", "Streams requested"),
            ("messages", "sent_messages", "Messages sent"),
            ("bytes", "sent_bytes", "Bytes of bodies sent, inline or by address"),
            ("missed", "missed_batches", "Batches of live streams that were dropped for clients that did not keep up"),
            ("flight", "flight_streams", "Streams over Flight's DoGet, which no other metric counts"),
        ):
            yield family(CounterMetricFamily, name, text, [], ([], totals[field]))
        outcomes = [([outcome], totals[outcome]) for outcome in OUTCOMES]
        yield family(
            CounterMetricFamily, "connections_ended", "Connections that ended, by outcome", ["outcome"], *outcomes
        )
        changes = [([kind], count) for kind, count in vars(now.changed).items()]
        text = "Changes of dataset versions in this server, by kind"
        yield family(CounterMetricFamily, "dataset_versions", text, ["change"], *changes)
        for kind, field, name, text in (
            (GaugeMetricFamily, "open", "connections_open", "Open connections"),
            (CounterMetricFamily, "accepted", "connections_accepted", "Connections accepted since the start"),
            (
                CounterMetricFamily,
                "refused",
                "connections_refused",
                "Accepted connections that were refused because of the limit",
            ),
        ):
            values = [([listener.uri], getattr(listener, field)) for listener in now.listeners]
            yield family(kind, name, text, ["listener"], *values)
        for kind, field, name, text in (
            (GaugeMetricFamily, "rows", "rows", "Rows, if known"),
            (GaugeMetricFamily, "size", "size_bytes", "Bytes of all bodies, if known"),
            (GaugeMetricFamily, "consumers", "consumers", "Open streams"),
            (GaugeMetricFamily, "leases", "leases", "Messages, or addresses, that consumers hold"),
            (CounterMetricFamily, "streams", "streams", "Streams requested since publication"),
            (CounterMetricFamily, "messages", "sent_messages", "Messages sent since publication"),
            (CounterMetricFamily, "bytes", "sent_bytes", "Bytes of bodies sent since publication"),
            (CounterMetricFamily, "missed", "missed_batches", "Batches that clients missed since publication"),
        ):
            values = [([dataset.name], getattr(dataset, field)) for dataset in now.datasets]
            yield family(kind, f"dataset_{name}", text, ["dataset"], *values)
