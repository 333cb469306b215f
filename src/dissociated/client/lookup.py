"""Look-up of datasets at a Flight server, of this library or any other.

Servers of this library understand a JSON command and JSON criteria, and report versions. Others may answer or refuse
anything in any way; their descriptors, criteria and `app_metadata` can have any meaning.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.host import boot_id, host_name
from dissociated.client.flight_connection import CatalogConnection
from dissociated.codec.reader import check_field_names
from dissociated.control.change_counter import CounterPlace, CounterView
from dissociated.control.dataset_info import DatasetInfo, DatasetList
from dissociated.control.descriptors import descriptor_name
from dissociated.errors import CatalogError, CatalogUnreachable, DatasetNotFound, RemoteProtocolError

_log = logging.getLogger(__name__)

_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")  # a byte that is not UTF-8, as `descriptor_name` escapes it
_OUR_ACTION = "committed"
_MAX_ANSWERS = 16  # answers that are kept
_MAX_ANSWER = 1 << 17  # bytes of an answer that is kept
_MAX_COUNTED = 16  # descriptions, and identities, that are kept for as long as the catalog changes nothing
_NOT_COUNTED = (None, None, 0)

#: The identity of the current version of each dataset, as `CatalogClient.current` returns it.
Identities = Mapping[str, dict[str, Any]]


class Lookup:
    """Queries for the datasets of the server of these `calls`. `CatalogClient` describes the parameters."""

    def __init__(self, calls: CatalogConnection) -> None:
        self._calls = calls
        #: The last answers to look-ups for reading, the latest first, with their descriptions.
        self._answers: deque[tuple[Any, DatasetInfo]] = deque(maxlen=_MAX_ANSWERS)
        self._counter: CounterView | None = None
        self._refused_place: CounterPlace | None = None
        #: By name and `embed`, the last descriptions, with the counter and the number from before the question.
        self._counted: dict[tuple[str, int], tuple[DatasetInfo, CounterView, int]] = {}
        #: The counter and the number from before questions, and the identities that they gave by name.
        self._identities: tuple[CounterView | None, int, Identities] = (None, 0, {})

    def list(self, prefix: str, tags: Mapping[str, str]) -> DatasetList:
        """List datasets. See `CatalogClient.list`."""
        criteria = json.dumps({"prefix": prefix, "tags": tags, **caller_identity()}).encode()
        try:
            datasets = self._list_flights(criteria)
        except CatalogUnreachable:
            raise
        except CatalogError:
            if self._is_ours():
                raise
            datasets = []
        if any(info.version for info in datasets) or (not datasets and (prefix or tags) and self._is_ours()):
            return DatasetList(datasets)
        # Other servers may interpret criteria in any way, so list everything. An empty catalog of this library also
        # gets here.
        everything = sorted(self._list_flights(b""), key=lambda info: info.name)
        return DatasetList(
            info for info in everything if info.name.startswith(prefix) and tags.items() <= info.tags.items()
        )

    def _list_flights(self, criteria: bytes) -> Sequence[DatasetInfo]:
        def list_flights(client: Any) -> Sequence[Any]:
            try:
                return [*client.list_flights(criteria, self._calls.call_options())]
            except NotImplementedError:
                raise CatalogError(
                    f"the server at {self._calls.uri} does not list its datasets (it has no ListFlights): ask for a "
                    "dataset by its name"
                ) from None

        return [self._parse_listed(info) for info in self._calls.call(list_flights)]

    def _parse_listed(self, info: Any) -> DatasetInfo:
        """Parse an entry of the list. A dataset whose schema is missing or unreadable has an empty one there.

        The other datasets can be found and read all the same. `describe` raises the error.
        """
        name = descriptor_name(info.descriptor)
        try:
            schema = pa.schema([]) if info.schema is None else check_field_names(info.schema)
        except (pa.ArrowException, ValueError, OSError) as error:
            _log.warning(
                "schema of a dataset is unreadable: server=%s dataset=%r error=%s", self._calls.uri, name, error
            )
            schema = pa.schema([])
        return DatasetInfo.parse(info, schema, name)

    def _is_ours(self) -> bool:
        try:
            actions = self._calls.call(lambda client: [*client.list_actions(self._calls.call_options())])
        except CatalogUnreachable:
            raise
        except CatalogError:
            return False
        return any(action.type == _OUR_ACTION for action in actions)

    def describe(self, name: str, version: int | None, embed: int = 0, reuse: bool = False) -> DatasetInfo:
        """Describe a dataset. See `CatalogClient.describe`.

        Args:
            name: See `CatalogClient.describe`.
            version: See `CatalogClient.describe`.
            embed: If all rows of the dataset fit into this number of bytes, the catalog may send them with its answer.
            reuse: Return the same object as before if the catalog answers the same as before, or would do so. It must
                not be changed.
        """
        if reuse and version is None:
            return self._current(name, embed) or self.describe_counted(name, embed)
        return self._describe(name, version, embed, reuse)

    def _current(self, name: str, embed: int) -> DatasetInfo | None:
        """Return the last description of a dataset, if the catalog has changed nothing since then.

        Raises the errors of a call that cannot be made.
        """
        info, counter, number = self._counted.get((name, embed), _NOT_COUNTED)
        if info is None or counter is None or counter.read() != number:
            return None
        if info.expires is not None and info.expires <= time.time():  # The catalog has the same clock.
            return None
        self._calls.connected()
        return info

    def describe_counted(self, name: str, embed: int = 0) -> DatasetInfo:
        """Describe a dataset, and keep the description for as long as the catalog's counter shows no change.

        The result must not be changed.
        """
        counter = self._counter
        number = 0 if counter is None else counter.read()  # before the question
        info = self._describe(name, None, embed, reuse=True)
        if info.counter is None:
            self._counted.pop((name, embed), None)
        elif counter is None or counter.place != info.counter:
            self._counter = self._open_counter(info.counter)
        elif number:
            if len(self._counted) >= _MAX_COUNTED:
                self._counted.clear()
            self._counted[name, embed] = info, counter, number
        return info

    def current(self, names: Sequence[str], ask: Callable[[Sequence[str]], Identities]) -> Identities:
        """Return the identities of the current versions of at least these datasets. See `CatalogClient.current`.

        Args:
            names: The names.
            ask: Asks the catalog, which is not necessary if it has changed nothing since the last question.
        """
        counter = self._counter
        number = 0 if counter is None else counter.read()  # before the question
        last_counter, last_number, identities = self._identities
        if not number or counter is not last_counter or number != last_number:
            identities = {}
        missing = [name for name in names if name not in identities]
        if not missing:
            self._calls.connected()
            return identities
        answer = ask(missing)
        self._identities = counter, number, {**identities, **answer} if len(identities) < _MAX_COUNTED else answer
        return {**identities, **answer}

    def _open_counter(self, place: CounterPlace) -> CounterView | None:
        """Return a view of a counter, unless it lies in another container, or belongs to another user."""
        if place != self._refused_place:
            try:
                return CounterView(place)
            except (PermissionError, FileNotFoundError, RemoteProtocolError):
                self._refused_place = place
            except OSError:
                pass  # This process may have too many open descriptors now.
        return None

    def close(self) -> None:
        """Close the view of the catalog's counter."""
        self._counter = None
        self._counted.clear()
        self._identities = None, 0, {}

    def _describe(self, name: str, version: int | None, embed: int, reuse: bool) -> DatasetInfo:
        descriptor = _descriptor(name, version, embed, host_name(), boot_id())
        try:
            info = self._get_flight_info(descriptor, name, reuse)
        except CatalogUnreachable as error:
            raise CatalogUnreachable(f"{name!r} cannot be looked up: {error}") from None
        except CatalogError as error:
            refused = error
        else:
            if info.version:
                return info
            refused = DatasetNotFound(f"the server at {self._calls.uri} has no dataset {name!r}")
            if version is not None:  # the answer may be for any version
                raise CatalogError(f"the server at {self._calls.uri} has no versions: leave out {version=}")
        if version is None:
            return self._describe_plainly(name, refused)
        if not self._is_ours():  # the server may quote the JSON command as an unknown name
            raise type(refused)(f"the server at {self._calls.uri} has no version {version} of {name!r}")
        raise refused

    def _describe_plainly(self, name: str, refused: CatalogError) -> DatasetInfo:
        """Describe a dataset of a Flight server that is not of this library, by command and then by path.

        Raise DatasetNotFound, or `refused`.
        """
        unknown: DatasetNotFound | None = None
        for descriptor in _plain_descriptors(name):
            try:
                info = self._get_flight_info(descriptor, name)
            except CatalogUnreachable:
                raise
            except DatasetNotFound as error:
                unknown = error
            except CatalogError as error:
                refused = error
            else:
                if not info.version:
                    return info
                raise refused  # a server of this library: the plain descriptor stands for another dataset there
        if unknown is not None and not self._is_ours():
            raise DatasetNotFound(f"the server at {self._calls.uri} has no dataset {name!r} ({unknown})")
        raise unknown or refused

    def _get_flight_info(self, descriptor: Any, name: str, reuse: bool = False) -> DatasetInfo:
        options = self._calls.call_options()
        answer = self._calls.call(lambda client: client.get_flight_info(descriptor, options))
        if not reuse:
            return self._parse(answer, name, descriptor)
        for earlier_answer, info in [*self._answers]:
            if earlier_answer == answer and info.name == name:
                return info
        info = self._parse(answer, name, descriptor)
        if info.version and len(answer.serialize()) <= _MAX_ANSWER:
            self._answers.appendleft((answer, info))
        return info

    def _parse(self, info: Any, name: str, descriptor: Any) -> DatasetInfo:
        """Parse the description of the dataset `name` that the server gave for `descriptor`."""
        try:
            schema = info.schema  # None if the server does not send it
            if schema is None:
                schema = self._get_schema(descriptor, name)
            return DatasetInfo.parse(info, check_field_names(schema), name)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise CatalogError(
                f"the server at {self._calls.uri} sent an unreadable schema for {name!r}: {error}"
            ) from None

    def _get_schema(self, descriptor: Any, name: str) -> pa.Schema:
        options = self._calls.call_options()
        try:
            return self._calls.call(lambda client: client.get_schema(descriptor, options).schema)
        except CatalogUnreachable:
            raise
        except CatalogError as error:
            raise CatalogError(
                f"the server at {self._calls.uri} does not say what columns {name!r} has: its FlightInfo has no "
                f"schema, and GetSchema failed ({error})"
            ) from None


@lru_cache(64)
def _descriptor(name: str, version: int | None, embed: int, host: str, boot: str) -> Any:
    command = {"name": name, "host": host, "boot_id": boot, **({} if version is None else {"version": version})}
    if embed:
        command["embed"] = embed
    return flight.FlightDescriptor.for_command(json.dumps(command))


def _plain_descriptors(name: str) -> Sequence[Any]:
    """Return the descriptors by which a foreign server may know a dataset of this name."""
    try:
        content = name.encode()
    except UnicodeEncodeError:
        return []
    commands = [content]
    if _ESCAPED.search(content):
        commands.append(_ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), content))
    paths = [[content], content.split(b"/")] if b"/" in content else [[content]]
    return [
        *map(flight.FlightDescriptor.for_command, commands),
        *(flight.FlightDescriptor.for_path(*path) for path in paths),
    ]


def caller_identity() -> dict[str, str]:
    """Return this host's identity, by which a catalog orders locations, the nearest first."""
    return {"host": host_name(), "boot_id": boot_id()}
