"""Spans of OpenTelemetry, in programs that have set up a tracer provider. Other programs never load OpenTelemetry."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dissociated.base.version import package_version

if TYPE_CHECKING:
    from opentelemetry import trace

#: Name of the header, and of the member of a request, that has the W3C trace context of its sender.
TRACEPARENT = "traceparent"

_API = "opentelemetry.trace"
_FORM = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class TraceSpan:
    """A span that has begun. Its owner ends it."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str | None:
        """The span's context, for requests that belong to it."""
        from opentelemetry import trace

        return _inject(trace.set_span_in_context(self._span))

    def set(self, **attributes: Any) -> None:
        """Set attributes of this library. Those that are None are left out."""
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(f"dissociated.{name}", value)

    def end(self, error: str | None = None) -> None:
        """End the span, as failed if the type of an `error` is given.

        The message of the error stays in the log: messages may have names and values that a trace should not have.
        """
        if error is not None:
            from opentelemetry import trace

            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this span the parent of the spans that the block begins."""
        from opentelemetry import trace

        with trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield


def begin(name: str, parent: str | None = None, *, server: bool = False, **attributes: Any) -> TraceSpan | None:
    """Begin a span.

    Args:
        name: Name of the span.
        parent: Trace context that a peer sent. An invalid one is ignored. If omitted, the parent of a client's span is
            the current span of this thread, and a server's span begins a trace.
        server: Whether the span is that of a server.
        attributes: See `TraceSpan.set`.

    Returns:
        The span; None if this process does not trace.
    """
    provider = _provider()
    if provider is None:
        return None
    from opentelemetry import trace
    from opentelemetry.context import Context

    remote = parent is not None and is_traceparent(parent)
    context = _extract(parent) if remote else Context() if server else None
    kind = trace.SpanKind.SERVER if server else trace.SpanKind.CLIENT
    span = TraceSpan(provider.get_tracer("dissociated", package_version()).start_span(name, context, kind))
    span.set(**attributes)
    return span


@contextmanager
def traced(name: str, parent: str | None = None, **attributes: Any) -> Iterator[TraceSpan | None]:
    """Trace the block by a client's span, which is the parent of the spans that the block begins. See `begin`."""
    span = begin(name, parent, **attributes)
    if span is None:
        yield None
        return
    error = None
    try:
        with span.current():
            yield span
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        span.end(error)


def annotate(**attributes: Any) -> None:
    """Set attributes of the current span of this thread, if this process traces. See `TraceSpan.set`."""
    if _provider() is not None:
        from opentelemetry import trace

        TraceSpan(trace.get_current_span()).set(**attributes)


def is_active() -> bool:
    """Return whether this process traces."""
    return _provider() is not None


def is_traceparent(value: object) -> bool:
    """Return whether `value` has the form of a W3C trace context."""
    return isinstance(value, str) and _FORM.fullmatch(value) is not None


def current_traceparent() -> str | None:
    """Return the trace context of the current span of this thread; None if there is none."""
    return None if _provider() is None else _inject(None)


def headers(traceparent: str | None) -> list[tuple[bytes, bytes]]:
    """Return the headers of a call of Flight that belongs to this trace context."""
    return [] if traceparent is None else [(TRACEPARENT.encode(), traceparent.encode())]


def _provider() -> trace.TracerProvider | None:
    # A program that sets up a provider has imported the API. Without it, a look at `sys.modules` is all that a span
    # costs.
    if _API not in sys.modules:
        return None
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider) else provider


def _inject(context: Any) -> str | None:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get(TRACEPARENT)


def _extract(traceparent: str | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent or ""}, Context())
