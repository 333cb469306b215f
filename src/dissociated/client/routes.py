"""The routes by which this process can reach a part of a dataset, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence

from dissociated.control.locations import Endpoint, describe_away, flight_uris, locations
from dissociated.errors import CatalogError, NodeUnreachable
from dissociated.transport import registry
from dissociated.uri import DEVICE, Uri


def reachable_routes(name: str, endpoint: Endpoint, scheme: str | None, allow_rma: bool) -> list[list[Uri]]:
    """Return the routes by which this process can reach an endpoint, nearest first.

    Args:
        name: The name of the dataset, for messages.
        endpoint: The endpoint.
        scheme: The scheme that the routes must have; None for any.
        allow_rma: Whether to include routes by remote memory access.

    Returns:
        The routes. They are empty if only Flight reaches the endpoint.

    Raises:
        NodeUnreachable: Its node does not respond.
        CatalogError: No route and no Flight server reaches it.
    """
    if endpoint.is_away:
        raise NodeUnreachable(describe_away(name, endpoint.hosts, endpoint.seen))
    routes = [
        uris
        for uris in locations(endpoint)
        if (scheme is None or uris[0].scheme == scheme)
        and (allow_rma or uris[-1].remote_handle is None)
        and DEVICE not in uris[-1].parameters
        and all(registry.transport(uri.scheme).reachable(uri) for uri in uris)
    ]
    by_flight = flight_uris(endpoint)
    if not routes and (scheme is not None or not by_flight):
        offered = ", ".join(sorted({*endpoint.schemes, *(["grpc"] if by_flight else [])}))
        raise CatalogError(
            f"{name!r} cannot be reached from here by {scheme or 'any transport'}: it is offered by {offered}"
        )
    # The sort is stable, so routes of equal preference keep the order of the server.
    return sorted(routes, key=_preference, reverse=True)


def _preference(uris: Sequence[Uri]) -> tuple[int, bool, bool]:
    """Return the rank of a route: the nearest medium first, then encryption, then remote memory access."""
    medium = registry.transport(uris[-1].scheme)
    return medium.locality, medium.encrypted, uris[-1].remote_handle is not None


def device_routes(endpoint: Endpoint, scheme: str | None, identity: str) -> list[Uri]:
    """Return the URIs at which the device addresses of an endpoint can be requested.

    Args:
        endpoint: The endpoint.
        scheme: The scheme that the URIs must have; None for any.
        identity: The identity of the device that must hold the data.
    """
    return [
        uri
        for route in locations(endpoint)
        for uri in route
        if uri.parameters.get(DEVICE) == identity
        and scheme in (None, uri.scheme)
        and registry.transport(uri.scheme).reachable(uri)
    ]
