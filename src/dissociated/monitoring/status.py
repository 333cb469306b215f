"""The status of a server, as a tree of plain values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypeVar

from dissociated.base.display import count, duration, html, html_table, plural, size
from dissociated.errors import FormatError

T = TypeVar("T")

#: The outcomes of connections. `done`: the stream was served completely, and the client has released all its memory.
#: `gone`: the client or the network failed before. `refused`: the request was invalid, or the dataset is missing or not
#: available to the client. `failed`: another error occurred.
OUTCOMES = ("done", "gone", "refused", "failed")


@dataclass(frozen=True)
class ConsumerStatus:
    """An open connection.

    Attributes:
        connection: The number of the connection.
        transport: The scheme of its transport.
        peer: A description of the client.
        state: `pending`, `reading`, `holding` or `cut off`.
        dataset: The name of the requested dataset; None before the request.
        seconds: The time since the connection was accepted.
        messages: The number of messages sent.
        bytes: The number of bytes of bodies sent, inline or by address.
        leases: The number of messages, or addresses, that the client holds.
        kept: The number of bytes of a live stream that the client still holds after it was cut off.
        rate: The number of bytes sent per second, since a recent reading of the status or else since the start.
        missed: The number of batches of a live stream that were dropped because the client did not keep up.
    """

    connection: int
    transport: str
    peer: str
    state: str
    dataset: str | None
    seconds: float
    messages: int
    bytes: int
    leases: int
    kept: int = 0
    rate: float = 0.0
    missed: int = 0


@dataclass(frozen=True)
class DatasetStatus:
    """The published versions of a dataset, and the data sent from them.

    Attributes:
        name: The name of the dataset.
        rows: The number of rows; None if unknown.
        size: The number of bytes; None if unknown.
        consumers: The number of open streams.
        streams: The number of requested streams.
        messages: The number of messages sent.
        bytes: The number of bytes of bodies sent, inline or by address.
        leases: The number of messages, or addresses, that clients hold.
        versions: The number of versions that are served. The counts above include all of them.
        missed: The number of batches of live streams that clients missed, in all versions that are served.
    """

    name: str
    rows: int | None
    size: int | None
    consumers: int
    streams: int
    messages: int
    bytes: int
    leases: int
    versions: int = 1
    missed: int = 0


@dataclass(frozen=True)
class ListenerStatus:
    """A listener of a server, and its connections.

    Attributes:
        uri: The URI of the listener.
        open: The number of open connections.
        accepted: The number of all connections since the start.
        refused: The number of accepted connections whose request was refused because there were too many.
    """

    uri: str
    open: int
    accepted: int
    refused: int


@dataclass(frozen=True)
class Totals:
    """The totals since the server started, including datasets that no longer exist.

    Attributes:
        streams: The number of requested streams, without those over Flight.
        messages: The number of messages sent.
        bytes: The number of bytes of bodies sent.
        flight: The number of streams over Flight's DoGet, which no other count includes.
        done: The number of ended connections with this outcome: see `OUTCOMES`.
        gone: The number of ended connections with this outcome.
        refused: The number of ended connections with this outcome.
        failed: The number of ended connections with this outcome.
        refused_puts: The number of puts, reservations of room and commits that ended with an error.
        missed: The number of batches of live streams that clients missed.
    """

    streams: int
    messages: int
    bytes: int
    flight: int
    done: int
    gone: int
    refused: int
    failed: int
    refused_puts: int = 0
    missed: int = 0


@dataclass(frozen=True)
class ChangeCounts:
    """The numbers of versions that were committed here, and of later changes to versions.

    A catalog counts the changes that it decides. Commits with parts on several nodes are counted by the catalog alone.

    Attributes:
        committed: The number of versions that were published.
        dropped: The number of versions that were deleted on request.
        expired: The number of versions whose time to live ended.
        retired: The number of replaced versions whose tickets are no longer guaranteed.
        evicted: The number of versions whose memory was freed, or whose node lost them.
        spilled: The number of versions that were moved to disk.
    """

    committed: int = 0
    dropped: int = 0
    expired: int = 0
    retired: int = 0
    evicted: int = 0
    spilled: int = 0


@dataclass(frozen=True)
class NodeStatus:
    """A node of the catalog.

    Attributes:
        host: The name of its host.
        catalog: The URI of the node's own catalog.
        alive: Whether its heartbeats are on time.
        seconds: The time since its last heartbeat, or since its registration was refused.
        id: The id of the node, for `dissociated forget`.
        clock: The number of seconds by which its clock is ahead of the catalog's.
        registered: Whether the catalog uses the node. If False, its registration was refused.
        problem: The reason of the refusal, or sentences about the clock and about versions that the node holds and the
            catalog does not list; empty if all is well.
    """

    host: str
    catalog: str
    alive: bool
    seconds: float
    id: str = ""
    clock: float = 0.0
    registered: bool = True
    problem: str = ""


@dataclass(frozen=True)
class StoreStatus:
    """The usage of a node's store.

    Attributes:
        held: The number of bytes in the store.
        limit: The maximum number of bytes; None if there is no limit.
        set_aside: A sentence for each entry of the store that is invalid, could not be read at the start, or is a
            version that the catalog does not list. Such entries are not served under their names.
        free: The number of free bytes in the file system of the store; None if that is unlimited or unknown.
        directory: The path of the store on its host.
        log: The path of the node's log; empty if it was not started in the background.
    """

    held: int
    limit: int | None
    set_aside: tuple[str, ...] = ()
    free: int | None = None
    directory: str = ""
    log: str = ""

    @property
    def effective_limit(self) -> int | None:
        """The number of bytes that the store can hold: its limit, or less if its file system has less room."""
        limits = [self.limit, None if self.free is None else self.held + self.free]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def room(self) -> int | None:
        """The number of bytes that the store can still take; None if that is unlimited or unknown."""
        limit = self.effective_limit
        return None if limit is None else max(0, limit - self.held)


@dataclass(frozen=True)
class ServerStatus:
    """The status of a server at one moment.

    Attributes:
        version: The version of the library.
        host: The name of the server's host.
        pid: The id of its process.
        seconds: The time since its start.
        catalog: The URI of its catalog; None if it has none.
        leases: The number of messages, or addresses, that consumers hold.
        totals: The totals since its start.
        listeners: Its listeners.
        datasets: The datasets that it serves.
        consumers: Its open connections.
        nodes: The nodes of its catalog.
        store: The usage of its store; None if it has none.
        kept: The number of bytes that clients still hold: of live streams after being cut off, and of segments no
            longer served after being cut off or disconnecting. The memory of a store is counted in `store` instead.
        changed: The numbers of changes to datasets.
        state: `running`; or `stopping` once the server accepts no connections and waits for streams in progress.
        waits_for: The numbers of the connections that a stopping server waits for.
        unreadable_parts: On a catalog, the number of parts of current versions that cannot be read, because their
            nodes are away or have set them aside.
        unreadable_datasets: The names of datasets with such parts, at most ten.
        problem: On a node, the reason why its last report to the catalog failed; empty if it succeeded.
    """

    version: str
    host: str
    pid: int
    seconds: float
    catalog: str | None
    leases: int
    totals: Totals
    listeners: tuple[ListenerStatus, ...]
    datasets: tuple[DatasetStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    nodes: tuple[NodeStatus, ...] = ()
    store: StoreStatus | None = None
    kept: int = 0
    changed: ChangeCounts = field(default_factory=ChangeCounts)
    state: str = "running"
    waits_for: tuple[int, ...] = ()
    unreadable_parts: int = 0
    unreadable_datasets: tuple[str, ...] = ()
    problem: str = ""

    def _repr_html_(self) -> str:
        """Return the datasets, consumers and totals as HTML for a notebook."""
        totals = self.totals
        lines = [
            f"{self.state} on {self.host}, process {self.pid}, for {duration(self.seconds)}",
            f"{size(totals.bytes)} in {plural(totals.streams, 'stream')}, {count(totals.flight)} over Flight",
            f"ended: {totals.done} done, {totals.gone} gone, {totals.refused} refused, {totals.failed} failed",
            *([] if self.catalog is None else [f"catalog at {self.catalog}"]),
            *([self.problem] if self.problem else []),
        ]
        datasets = [
            [dataset.name, count(dataset.rows), size(dataset.size), count(dataset.consumers), size(dataset.bytes)]
            for dataset in self.datasets
        ]
        consumers = [
            [consumer.peer, consumer.dataset or "", consumer.state, duration(consumer.seconds), size(consumer.bytes)]
            for consumer in self.consumers
        ]
        tables = [
            (["dataset", "rows", "size", "consumers", "sent"], datasets, (1, 2, 3, 4)),
            (["peer", "dataset", "state", "for", "sent"], consumers, (3, 4)),
        ]
        return html(f"dissociated {self.version}", lines, *(html_table(*table) for table in tables if table[1]))

    def plain(self) -> dict[str, Any]:
        """Return the status as dicts, lists, strings and numbers, for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Any) -> ServerStatus:
        """Return the status in the result of `plain`, without unknown fields. Raise FormatError if it is invalid."""
        try:
            status = _from_plain(cls, plain)
            parts: dict[str, Any] = {"totals": _from_plain(Totals, plain["totals"])}
            if plain["store"] is not None:
                store = _from_plain(StoreStatus, plain["store"])
                parts["store"] = replace(store, set_aside=tuple(map(str, store.set_aside)))
            parts["waits_for"] = tuple(map(operator.index, plain.get("waits_for", ())))
            parts["unreadable_datasets"] = tuple(map(str, plain.get("unreadable_datasets", ())))
            parts["changed"] = _from_plain(ChangeCounts, plain.get("changed", {}))
            for name, kind in (
                ("listeners", ListenerStatus),
                ("datasets", DatasetStatus),
                ("consumers", ConsumerStatus),
                ("nodes", NodeStatus),
            ):
                parts[name] = tuple(_from_plain(kind, item) for item in plain[name])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise FormatError(f"the answer is not the status of a server: {error!r}") from None
        return cls(**{**vars(status), **parts})


#: The types that JSON may have for a field, by the annotation of the field. Other fields are parsed separately.
_PLAIN_TYPES: Mapping[object, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
}


def _from_plain(kind: type[T], plain: Mapping[str, Any]) -> T:
    for field_ in fields(kind):  # type: ignore[arg-type]
        if field_.name in plain and not isinstance(plain[field_.name], _PLAIN_TYPES.get(field_.type, object)):
            raise TypeError(f"{field_.name} is {type(plain[field_.name]).__name__}, not {field_.type}")
    needed = [field_.name for field_ in fields(kind) if field_.default is field_.default_factory is MISSING]  # type: ignore[arg-type]
    present = [field_.name for field_ in fields(kind) if field_.name in plain]  # type: ignore[arg-type]
    return kind(**{name: plain[name] for name in {*needed, *present}})
