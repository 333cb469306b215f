"""Datasets as a Flight server tells of them: one of ours, or of somebody else's.

Ours understand a command and criteria in JSON, and tell versions. Others may answer whatever they are asked, or refuse
it in any way; their descriptors, criteria and `app_metadata` mean what they like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from dissociated.base.host import boot_id, host_name
from dissociated.client.flight_connection import CatalogConnection
from dissociated.codec.reader import check_field_names
from dissociated.control.locations import DatasetInfo, DatasetList, descriptor_name
from dissociated.errors import CatalogError, CatalogUnreachable, DatasetNotFound

_ESCAPED = re.compile(rb"\\x([0-9a-f]{2})")  # a byte, as `descriptor_name` writes what is no UTF-8
_OUR_ACTION = "committed"


class Lookup:
    """Asks the server of these `calls` what it has. `CatalogClient` says what the parameters mean."""

    def __init__(self, calls: CatalogConnection) -> None:
        self._calls = calls

    def list(self, prefix: str, tags: Mapping[str, str]) -> DatasetList:
        """See `CatalogClient.list`."""
        criteria = json.dumps({"prefix": prefix, "tags": tags, **caller_identity()}).encode()
        try:
            found = self._list_flights(criteria)
        except CatalogUnreachable:
            raise
        except CatalogError:
            if self._is_ours():
                raise
            found = []
        if any(info.version for info in found) or (not found and (prefix or tags) and self._is_ours()):
            return DatasetList(found)
        # Others may understand by criteria what they like. A catalog of ours comes here, too, where it has nothing.
        everything = sorted(self._list_flights(b""), key=lambda info: info.name)
        return DatasetList(
            info for info in everything if info.name.startswith(prefix) and tags.items() <= info.tags.items()
        )

    def _list_flights(self, criteria: bytes) -> Sequence[DatasetInfo]:
        def list_flights(client: Any) -> Sequence[Any]:
            try:
                return [*client.list_flights(criteria, self._calls.options())]
            except NotImplementedError:
                raise CatalogError(
                    f"the server at {self._calls.uri} does not list what it has (it has no ListFlights): "
                    "ask for a dataset by its name"
                ) from None

        return [self._parse(info, descriptor_name(info.descriptor)) for info in self._calls.call(list_flights)]

    def _is_ours(self) -> bool:
        try:
            actions = self._calls.call(lambda client: [*client.list_actions(self._calls.options())])
        except CatalogUnreachable:
            raise
        except CatalogError:
            return False
        return any(action.type == _OUR_ACTION for action in actions)

    def describe(self, name: str, version: int | None) -> DatasetInfo:
        """See `CatalogClient.describe`."""
        command = {"name": name, **caller_identity(), **({} if version is None else {"version": version})}
        descriptor = self._calls.flight.FlightDescriptor.for_command(json.dumps(command))
        try:
            info = self._get_flight_info(descriptor, name)
        except CatalogUnreachable:
            raise
        except CatalogError as error:
            refused = error
        else:
            if info.version:
                return info
            refused = DatasetNotFound(f"the server at {self._calls.uri} knows no dataset {name!r}")
            if version is not None:  # what it has answered with is any version, or none
                raise CatalogError(f"the server at {self._calls.uri} knows no versions: leave out {version=}")
        if version is None:
            return self._describe_plainly(name, refused)
        if boot_id() in str(refused):  # it repeats the command, which means nothing to it
            raise type(refused)(f"the server at {self._calls.uri} knows no version {version} of {name!r}")
        raise refused

    def _describe_plainly(self, name: str, refused: CatalogError) -> DatasetInfo:
        """What a server says that is asked as others ask. Raises DatasetNotFound, or what it was refused with."""
        unknown: DatasetNotFound | None = None
        for descriptor in _plain_descriptors(self._calls.flight.FlightDescriptor, name):
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
                raise refused  # by ours, which means another dataset by a name that is escaped, or is JSON
        if unknown is not None and name not in str(unknown):
            raise DatasetNotFound(f"the server at {self._calls.uri} knows no dataset {name!r} ({unknown})")
        raise unknown or refused

    def _get_flight_info(self, descriptor: Any, name: str) -> DatasetInfo:
        options = self._calls.options()
        info = self._calls.call(lambda client: client.get_flight_info(descriptor, options))
        return self._parse(info, name, descriptor)

    def _parse(self, info: Any, name: str, descriptor: Any = None) -> DatasetInfo:
        """What is told of the dataset `name`, which was asked for with this `descriptor`, if with any."""
        try:
            schema = info.schema  # None where it is not told
            if schema is None and descriptor is None:
                schema = pa.schema([])
            elif schema is None:
                schema = self._get_schema(descriptor, name)
            return DatasetInfo.parse(info, check_field_names(schema), name)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise CatalogError(
                f"the server at {self._calls.uri} tells of columns of {name!r} that cannot be read: {error}"
            ) from None

    def _get_schema(self, descriptor: Any, name: str) -> pa.Schema:
        options = self._calls.options()
        try:
            return self._calls.call(lambda client: client.get_schema(descriptor, options).schema)
        except CatalogUnreachable:
            raise
        except CatalogError as error:
            raise CatalogError(
                f"the server at {self._calls.uri} does not say what columns {name!r} has: its FlightInfo has no "
                f"schema, and GetSchema failed ({error})"
            ) from None


def _plain_descriptors(flight_descriptor: Any, name: str) -> Sequence[Any]:
    """How a server that is not ours may know what `DatasetInfo.name`, or a user, calls so."""
    try:
        content = name.encode()
    except UnicodeEncodeError:
        return []
    commands = [content]
    if _ESCAPED.search(content):
        commands.append(_ESCAPED.sub(lambda match: bytes([int(match[1], 16)]), content))
    paths = [[content], content.split(b"/")] if b"/" in content else [[content]]
    return [*map(flight_descriptor.for_command, commands), *(flight_descriptor.for_path(*path) for path in paths)]


def caller_identity() -> dict[str, str]:
    """Who asks: a catalog then names the nearest first."""
    return {"host": host_name(), "boot_id": boot_id()}
