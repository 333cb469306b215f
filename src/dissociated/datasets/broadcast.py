"""Broadcast datasets: live streams whose source is read once for all consumers."""

from __future__ import annotations

import threading
from abc import abstractmethod

import pyarrow as pa

from dissociated.codec.columns import select_columns, select_fields
from dissociated.codec.join import Messages, join
from dissociated.codec.options import WriteOptions, check_options
from dissociated.datasets.base import Dataset, IsGone, Source
from dissociated.datasets.consumer import Consumer
from dissociated.datasets.fanout import Fanout
from dissociated.datasets.live import Live
from dissociated.datasets.live_message import LiveMessage
from dissociated.datasets.pump import Pump
from dissociated.datasets.sources import check_schema, open_source
from dissociated.errors import ConnectionClosed, OptionError
from dissociated.format.projection import Projection

#: Seconds between two looks whether a client that waits for the next message is gone.
_GONE_INTERVAL = 0.25


class BroadcastDataset(Dataset):
    """A dataset whose messages are read once, for all clients together."""

    #: The publisher's options.
    live: Live
    #: Distributes the messages. A consumer joins it.
    fanout: Fanout

    @property
    def notes_missed(self) -> bool:  # type: ignore[override]
        return self.live.policy != "block"

    def open_reader(self) -> pa.RecordBatchReader:
        return self.open_reader_for(None)

    @abstractmethod
    def open_reader_for(self, is_gone: IsGone | None) -> pa.RecordBatchReader: ...

    @abstractmethod
    def project(self, item: LiveMessage) -> LiveMessage | None:
        """Return the part of a message that a consumer of this dataset is sent, or None if it is sent no part."""


class Broadcast(BroadcastDataset):
    """A source that is read once for all clients together: see `Fanout`. Close it after use.

    `limit` is the largest number of its bytes that may be held in shared memory. `schema` is that of an iterator or a
    list of record batches.
    """

    splits_streams = False  # each connection has a position of its own in the stream
    filterable = False

    def __init__(
        self,
        name: str,
        source: Source,
        live: Live,
        limit: int,
        options: WriteOptions | None = None,
        schema: pa.Schema | None = None,
    ) -> None:
        if not isinstance(live, Live):
            raise OptionError(f"live is {live!r}; it must be a dissociated.Live")
        check_options(options, WriteOptions)
        check_schema(source, schema)
        reader = open_source(name, source, schema)
        super().__init__(name, reader.schema)
        self.live = live
        self._pump = Pump(name, reader, options)
        self.fanout = Fanout(name, self._pump.schema, live, limit, self._pump.start)

    def project(self, item: LiveMessage) -> LiveMessage | None:
        return item

    @property
    def exhausted(self) -> bool:  # type: ignore[override]
        return self.fanout.has_ended

    def open_reader_for(self, is_gone: IsGone | None) -> pa.RecordBatchReader:
        woken = threading.Event()
        return join(_messages(self.fanout, self.fanout.join(woken.set), woken, is_gone))

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return _BroadcastColumns(self, indices, self._pump.schema.header)

    def drop(self) -> None:
        self.fanout.drop()
        self._pump.discard()

    def close(self) -> None:
        self.fanout.close()
        self._pump.discard()

    def wait_closed(self, timeout: float) -> None:
        self._pump.join(timeout)


class _BroadcastColumns(BroadcastDataset):
    """Some columns of a broadcast. A consumer is sent their buffers alone, and frees all other buffers at once."""

    def __init__(self, whole: Broadcast, indices: tuple[int, ...], schema: bytes) -> None:
        super().__init__(whole.name, select_fields(whole.schema, indices))
        self.live, self.fanout = whole.live, whole.fanout
        self._indices = indices
        self._whole = whole
        self._schema = schema  # the encoded schema message of the whole dataset
        self._projection = Projection(schema, indices)

    def project(self, item: LiveMessage) -> LiveMessage | None:
        if item.body is None:
            return item._replace(header=self._projection.header)
        chosen = self._projection.project(item.header, item.parsed)
        if chosen is None:
            return None
        if chosen.header is item.header:
            return item
        if item.repeats is not None:
            first, *more = [b"".join(chosen.body((body,))) for body in item.bodies]
            return LiveMessage(chosen.header, chosen.parsed, (first,), repeats=more)
        extents = [item.extents[index] for index in chosen.indices] if item.extents else []
        return LiveMessage(chosen.header, chosen.parsed, chosen.body(item.body), 0, item.region, extents)

    def open_reader_for(self, is_gone: IsGone | None) -> pa.RecordBatchReader:
        return select_columns(self._whole.open_reader_for(is_gone), self._indices)

    def _select(self, indices: tuple[int, ...]) -> Dataset:
        return _BroadcastColumns(self._whole, tuple(self._indices[index] for index in indices), self._schema)


def _messages(fanout: Fanout, consumer: Consumer, woken: threading.Event, is_gone: IsGone | None) -> Messages:
    """Yield the messages of `consumer`, for libarrow to join into batches in this process.

    Raises:
        ConnectionClosed: The consumer is a client, and `is_gone`.
    """
    interval = None if is_gone is None else _GONE_INTERVAL
    try:
        while not consumer.finished:
            items = fanout.take(consumer)
            if not items:
                while not woken.wait(interval):
                    if is_gone is not None and is_gone():
                        raise ConnectionClosed(f"the client of the live stream {fanout.name!r} has disconnected")
                woken.clear()
            for message in [message for item in items for message in item.each()]:
                body = None if message.body is None else b"".join(message.body)
                fanout.free(consumer, message.addresses)
                yield message.header, body
    finally:
        fanout.leave(consumer)
