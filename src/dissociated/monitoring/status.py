"""What a server is doing and has done, as a tree of plain values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypeVar

from dissociated.errors import FormatError

T = TypeVar("T")

#: How connections end: the stream was served whole, and all memory of it given back; the client or the network was gone
#: before; what it asked for is not there or not for it; something else went wrong.
OUTCOMES = ("done", "gone", "refused", "failed")


@dataclass(frozen=True)
class ConsumerStatus:
    """One open connection.

    - `dataset`: what it has asked for. None until it has.
    - `seconds`: how long it has been open.
    - `messages`, `bytes`: what it was sent. The bytes are those of bodies, whether sent inline or by address.
    - `leases`: how many addresses it holds.
    - `kept`: how many bytes of a live stream it still holds although it was cut off.
    - `rate`: bytes that it was sent in a second: of late, where somebody has looked, and else since it is open.
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


@dataclass(frozen=True)
class DatasetStatus:
    """What is published under a name, and what was sent of it.

    - `rows`, `size`: how many rows and bytes it has. None where they are not known.
    - `streams`: how often it was asked for. `consumers`: how many of these streams are open.
    - `messages`, `bytes`, `leases`: what was sent of it, and how many addresses are held.
    - `versions`: how many versions of it are served. Older ones are counted with it.
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


@dataclass(frozen=True)
class ListenerStatus:
    """Where a server listens, and the connections there: those that are open, and all there have been.

    Of these, `refused` were turned away when they asked, since there were too many.
    """

    uri: str
    open: int
    accepted: int
    refused: int


@dataclass(frozen=True)
class Totals:
    """All there has been since the server began, datasets that are no more included.

    Connections that ended are counted by outcome. `flight` counts streams over Flight's DoGet, which nothing else does.
    """

    streams: int
    messages: int
    bytes: int
    flight: int
    done: int
    gone: int
    refused: int
    failed: int


@dataclass(frozen=True)
class ChangeCounts:
    """How many versions of datasets were committed here, what became of them, and how many moved to disk.

    `expired` are those whose time to live was over, `retired` those that had been replaced, `evicted` those whose
    memory or node had to go. A catalog counts what it decides; commits of several nodes are counted there alone.
    """

    committed: int = 0
    dropped: int = 0
    expired: int = 0
    retired: int = 0
    evicted: int = 0
    spilled: int = 0


@dataclass(frozen=True)
class NodeStatus:
    """A node of the catalog: where its own catalog answers, and how many seconds ago it said that it lives."""

    host: str
    catalog: str
    alive: bool
    seconds: float


@dataclass(frozen=True)
class StoreStatus:
    """What the store of a node holds, in bytes, and what it may; `limit` is None if there is none.

    `set_aside` has a sentence for each entry of the store that was no version, or could not be read, when the node
    began: nothing of it is served.
    """

    held: int
    limit: int | None
    set_aside: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServerStatus:
    """One moment of a server.

    - `version`: that of the library.
    - `pid`: the id of its process.
    - `seconds`: how long it has been running.
    - `catalog`: the URI where its catalog answers. None for a server without one.
    - `leases`: how many addresses consumers hold.
    - `store`: None for a server without a store.
    - `kept`: how many bytes of live streams those consumers hold that were cut off; and of segments that are served no
      more, those who were cut off or left. A store counts its own.
    - `state`: "running"; or "stopping" once the server takes no new connections and waits for streams in progress.
    - `waits_for`: the numbers of the connections that a server that is stopping waits for.
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

    def plain(self) -> dict[str, Any]:
        """The same in dicts, lists, strings and numbers: for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Any) -> ServerStatus:
        """The opposite of `plain`. What it does not know it leaves out. Raises FormatError."""
        try:
            status = _from_plain(cls, plain)
            parts: dict[str, Any] = {"totals": _from_plain(Totals, plain["totals"])}
            if plain["store"] is not None:
                store = _from_plain(StoreStatus, plain["store"])
                parts["store"] = replace(store, set_aside=tuple(map(str, store.set_aside)))
            parts["waits_for"] = tuple(map(operator.index, plain.get("waits_for", ())))
            parts["changed"] = _from_plain(ChangeCounts, plain.get("changed", {}))
            for name, kind in (
                ("listeners", ListenerStatus),
                ("datasets", DatasetStatus),
                ("consumers", ConsumerStatus),
                ("nodes", NodeStatus),
            ):
                parts[name] = tuple(_from_plain(kind, one) for one in plain[name])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise FormatError(f"this is not the status of a server: {error!r}") from None
        return cls(**{**vars(status), **parts})


#: The values that JSON may have for a field, by the field's type as it is written above. Others are parsed apart.
_PLAIN_TYPES: Mapping[object, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "str | None": (str, NoneType),
    "int | None": (int, NoneType),
}


def _from_plain(kind: type[T], plain: Mapping[str, Any]) -> T:
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name in plain and not isinstance(plain[one.name], _PLAIN_TYPES.get(one.type, object)):
            raise TypeError(f"{one.name} is {type(plain[one.name]).__name__}, not {one.type}")
    needed = [one.name for one in fields(kind) if one.default is one.default_factory is MISSING]  # type: ignore[arg-type]
    known = [one.name for one in fields(kind) if one.name in plain]  # type: ignore[arg-type]
    return kind(**{name: plain[name] for name in {*needed, *known}})
