"""The endpoints of a server: the URIs of its listeners, with the parameters by which a client requests a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from dissociated.base import tracing
from dissociated.catalog.holdings import OwnLocations
from dissociated.datasets.base import Dataset
from dissociated.errors import DatasetNotFound, SourceError
from dissociated.memory.device.segment import DeviceSegment
from dissociated.memory.remote import with_spans
from dissociated.protocol.request import (
    FILTER_PARAMETER,
    FREES_PARAMETER,
    MISSED_PARAMETER,
    REQUEST_PARAMETER,
    TRACE_PARAMETER,
)
from dissociated.protocol.wire import Streams
from dissociated.server.requests import FREE_DATA, want_tag
from dissociated.transport.base import Listener
from dissociated.transport.registry import transport
from dissociated.uri import ANY_INTERFACE, DEVICE, PACKED, Uri


class Endpoints(OwnLocations):
    """The locations of `listeners`. A listener on all interfaces has the host name `default_host` in its locations.

    `listeners` may still grow: each method uses those that are in it when it is called.
    """

    def __init__(self, listeners: Sequence[Listener], default_host: str, applies_filters: bool) -> None:
        self._listeners = listeners
        self._selections = dict((REQUEST_PARAMETER, FILTER_PARAMETER) if applies_filters else (REQUEST_PARAMETER,))
        self._default_host = default_host
        self._advertised: dict[Listener, Uri] = {}  # the hosts and ports that replace those of listeners
        self._texts: dict[tuple[Listener, bool, bool, bool], str] = {}  # locations that many datasets share

    def advertise(self, listener: Listener, advertised: Uri) -> None:
        """Announce a listener by the host and the port of `advertised`, as far as it has them."""
        self._advertised[listener] = advertised
        self._texts.clear()

    @property
    def _parameters(self) -> dict[str, str]:
        """The capabilities of the server, which all locations have as parameters."""
        return {**self._selections, **dict([TRACE_PARAMETER] if tracing.is_active() else [])}

    @property
    def exposes_memory(self) -> bool:
        """Whether a listener lets clients map this process's memory or fetch from it."""
        return any(
            listener.exposes_memory or transport(listener.uri.scheme).shares_memory for listener in self._listeners
        )

    def listener_uris(self) -> list[str]:
        return [str(listener.uri) for listener in self._listeners]

    def base_locations(self) -> list[str]:
        return [str(self._location(listener, None, Streams.BOTH, False)) for listener in self._listeners]

    def locations(self, dataset: Dataset, streams: Streams, packed: bool) -> list[str]:
        """Return the URIs at which `dataset` can be requested, one for each listener."""
        return [str(self._location(listener, dataset, streams, packed)) for listener in self._listeners]

    def dataset_locations(self, dataset: Dataset) -> list[str]:
        """Return the locations of `dataset`, in the order in which clients should try them.

        Locations for clients that can open the dataset's device come first. A location from which clients fetch memory
        is followed by one at the same listener that sends packed bodies.
        """
        segment = dataset.device_segment
        on_device = [] if segment is None or not segment.span.key else self._device_locations(segment)
        on_host = [
            self._text(listener, dataset, packed)
            for listener in self._listeners
            for packed in ((False, True) if listener.exposes_memory else (False,))
        ]
        return [*on_device, *on_host]

    def are_fixed(self, dataset: Dataset) -> bool:
        """Return whether the locations of `dataset` stay as they are, because none has addresses of its memory."""
        return dataset.device_segment is None and not any(listener.exposes_memory for listener in self._listeners)

    def _text(self, listener: Listener, dataset: Dataset, packed: bool) -> str:
        if listener.exposes_memory:  # the location of each dataset has its memory
            return str(self._location(listener, dataset, Streams.BOTH, packed))
        key = listener, packed, dataset.notes_missed, tracing.is_active()
        if key not in self._texts:
            self._texts[key] = str(self._location(listener, dataset, Streams.BOTH, packed))
        return self._texts[key]

    def _device_locations(self, segment: DeviceSegment) -> list[str]:
        """Return the locations at which clients on this host can request addresses in `segment`."""
        tag = want_tag(Streams.BOTH, False, device=True)
        return [
            str(
                with_spans(
                    Uri(
                        listener.uri.scheme,
                        path=listener.uri.path,
                        want_data=tag,
                        free_data=FREE_DATA,
                        parameters={
                            **listener.uri.parameters,
                            **self._parameters,
                            **dict([FREES_PARAMETER]),
                            DEVICE: segment.device.identity,
                        },
                    ),
                    [segment.span],
                )
            )
            for listener in self._listeners
            if transport(listener.uri.scheme).shares_memory
        ]

    def reference_locations(self, dataset: Dataset) -> list[str]:
        """Return the two URIs that the C++ reference client expects, the first for metadata, the second for bodies.

        That client needs a listener on UCX without error handling, `ucx:?err_mode=none`. The list is empty if there is
        no such listener, or if the streams of `dataset` cannot be split over two connections.
        """
        if not dataset.splits_streams:
            return []
        for listener in self._listeners:
            if listener.uri.parameters.get("err_mode") == "none":
                both = (Streams.METADATA, Streams.BODIES)
                return [str(self._location(listener, dataset, streams, packed=True)) for streams in both]
        return []

    def _location(self, listener: Listener, dataset: Dataset | None, streams: Streams, packed: bool) -> Uri:
        uri = listener.uri
        advertised = self._advertised.get(listener, uri)
        by_address = not packed and bool(streams & Streams.BODIES)
        memory = None
        if dataset is not None and by_address and listener.exposes_memory:
            # A damaged dataset is an error for the clients that read it, not for those that list datasets.
            with suppress(SourceError, DatasetNotFound):
                memory = dataset.open_exposed()
        regions = () if memory is None else memory.regions()
        located = Uri(
            uri.scheme,
            host=self._default_host if advertised.host in ANY_INTERFACE else advertised.host,
            port=advertised.port or uri.port,
            path=uri.path,
            want_data=want_tag(streams, packed),
            free_data=FREE_DATA if regions or (by_address and transport(uri.scheme).shares_memory) else None,
            parameters={**uri.parameters, **self._parameters},
        )
        if by_address and transport(uri.scheme).shares_memory:
            located = located.with_parameters(**{PACKED: str(want_tag(streams, True))})
        if located.free_data is not None:
            located = located.with_parameters(**dict([FREES_PARAMETER]))
        if dataset is not None and dataset.notes_missed:
            located = located.with_parameters(**dict([MISSED_PARAMETER]))
        if regions:
            located = with_spans(located, [listener.expose(region) for region in regions])
        return located if streams is Streams.BOTH else located.with_parameters(stream=str(streams.name).lower())
