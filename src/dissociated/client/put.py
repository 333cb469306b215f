"""A put: the reading of a source, its transfer to a node, and the commit.

Data goes through shared memory to a node on the same host, or by Flight's DoPut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow.flight import FlightDescriptor

from dissociated.client.calls import CatalogClient
from dissociated.client.staging import staged_file
from dissociated.codec.columns import values_size
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.codec.validation import Validator
from dissociated.control.commit import Commit, StagedSegment
from dissociated.control.flight_streams import upload
from dissociated.datasets.base import Dataset
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded, DissociatedError
from dissociated.store.files import Reserve
from dissociated.store.segment import SegmentWriter
from dissociated.store.stage import StagePlace

#: Is called with the rows and bytes so far, and with the total number of rows, or None if it is unknown.
Progress: TypeAlias = Callable[[int, int, int | None], object]


@dataclass
class Put:
    """A reading of `source`, to be published as `commit` describes.

    Args:
        commit: The commit, without segments and schema.
        source: The data.
        progress: See `Progress`.

    Raises:
        SourceError: The source cannot be read.
    """

    commit: Commit
    source: Dataset
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._reader = self.source.open_reader()
        #: Number of rows that were read so far.
        self.rows = 0
        #: Whether all data was read. Incomplete data is not published.
        self.complete = False
        self._progress_error: BaseException | None = None
        #: Bytes of all bodies, or a lower bound, or None. A node first makes room for this many bytes.
        self.nbytes = self._measure() if self.source.repeatable else self.source.min_packed_size

    def _measure(self) -> int | None:
        with source_errors(self.commit.name):
            for _ in batches(self.source.open_reader()):
                pass  # refuse invalid data before its content is read
        return self.source.packed_size

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the published data."""
        return self._reader.schema

    def publish(self, client: CatalogClient, transport: str | None) -> int:
        """Transfer the data by "shm" or "grpc", and commit it. See `Client.put`."""
        stage = None if transport == "grpc" else _stage_here(client)
        if stage is None and transport == "shm":
            raise CatalogError("there is no node on this host whose memory this process could write to: put by grpc")
        if stage is None:
            client.sql_database.kept_versions.close()  # a node may need their memory
            _require_catalog(client, self.commit.key)
        try:
            if stage is not None:
                return self._write_and_commit(client, stage)
            return client.call_flight(self.send_by_flight)
        except BaseException as error:
            if (stage is not None or self.complete) and self._was_published(client, error):
                return self.rows
            if self._progress_error is None:
                raise
            error, self._progress_error = self._progress_error, None  # Flight raises another one
            raise error from None

    def _write_and_commit(self, client: CatalogClient, stage: StagePlace) -> int:
        segment = StagedSegment(f"{self.commit.key}-0.arrows", stage.node)
        validator = Validator(self.schema)
        with staged_file(stage, segment.name, client.with_uri, self.commit) as (path, reserve):
            reserve_all = None if reserve is None else self._reserve_all(reserve)
            with SegmentWriter(path, self.schema, reserve=reserve_all) as writer:
                for batch, metadata in self.pairs():
                    writer.write_batch(validator.check(batch), metadata)
        client.commit(replace(self.commit, segments=[segment], schema=self.schema))
        return writer.rows

    def _was_published(self, client: CatalogClient, error: BaseException) -> bool:
        """Return whether a put that ended with `error` was published. If False, it never will be.

        Raises:
            CatalogUnreachable, DeadlineExceeded: See `was_published`.
        """
        if self.complete and isinstance(error, DissociatedError):  # neither interrupted nor incomplete
            return was_published(client, self.commit, error)
        with suppress(DissociatedError):  # the catalog itself gives up uncommitted segments later
            client.abort(self.commit.key)
        return False

    def pairs(self) -> Iterator[BatchAndMetadata]:
        """Yield all batches and their metadata, once, and call `progress` after each.

        Raises:
            SourceError: The source cannot be read. Errors of `progress` are passed on.
        """
        remaining = batches(self._reader)
        nbytes = 0
        while True:
            with source_errors(self.commit.name):
                pair = next(remaining, None)
            if pair is None:
                self.complete = True
                return
            yield pair
            self.rows += pair[0].num_rows
            if self.progress is not None:
                nbytes += values_size(pair[0])
                try:
                    self.progress(self.rows, nbytes, self.source.rows)
                except BaseException as error:
                    self._progress_error = error
                    raise

    def send_by_flight(self, client: Any) -> int:
        """Send the data by DoPut of a Flight client, which commits it. Return the number of rows."""
        command = {**self.commit.options(), "end": True, "nbytes": self.nbytes}
        answer = upload(client, FlightDescriptor.for_command(json.dumps(command)), self.schema, self.pairs())
        if not isinstance(answer.get("rows"), int):
            raise CatalogError("the server read the whole stream, and does not say how many rows it published")
        return int(answer["rows"])

    def _reserve_all(self, reserve: Reserve) -> Reserve:
        """Return a `reserve` that first requests the room for all data."""
        whole = self.nbytes or 0
        return lambda name, size, wish: reserve(name, max(size, whole), max(wish, whole))


def was_published(client: CatalogClient, commit: Commit, error: DissociatedError) -> bool:
    """Return whether a commit that ended with `error` took effect. If False, it never will.

    Args:
        client: The client of the catalog.
        commit: The commit, with its key.
        error: The error of the commit.

    Raises:
        CatalogUnreachable, DeadlineExceeded: The catalog does not answer this either. The error has the type of
            `error`, and its message adds the uncertainty.
    """
    try:
        client.abort(commit.key)  # waits for a commit in progress, or prevents it
        return client.committed(commit.key)
    except (CatalogUnreachable, DeadlineExceeded):
        raise type(error)(
            f"{error}; nor did it say whether {commit.name!r} was published in the end: look at its versions before "
            "you put it again"
        ) from error
    except DissociatedError:
        return False  # the server is not of this library, and does not know the action


def _stage_here(client: CatalogClient) -> StagePlace | None:
    """Return the stage of a node that this process can write to, or None."""
    try:
        stage = client.stage()
    except CatalogUnreachable:
        raise
    except CatalogError:
        return None  # the server has no stage, or is not of this library
    return stage if stage.here else None


def _require_catalog(client: CatalogClient, key: str) -> None:
    """Raise CatalogError if the server is not a catalog of this library, by a call with this `key`."""
    try:
        client.committed(key)
    except CatalogUnreachable:
        raise
    except CatalogError as error:
        raise CatalogError(
            f"the server at {client.uri} is not a catalog of this library, and would take the description of the "
            f"put as a name: use do_put of pyarrow.flight ({error})"
        ) from None
