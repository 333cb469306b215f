"""The C++ reference (apache/arrow-experiments, dissociated-ipc), imitated step by step without this library.

The order of messages, flags, tags and error mode are those of the reference. So are flatbuffers that are not padded to
8 bytes, bodies in pieces that are posted all at once, bodies that are received newest first, and a client that closes
first.
"""

from __future__ import annotations

import struct
import threading
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from support.ucx_peer import PATIENCE, Context, Worker

WANT_METADATA = 18446741783881759408  # 0xFFFFFDEADBA0BAB0
WANT_DATA = 15302358252208  # 0x00000DEADBA0BAB0
METADATA_BITS = 0xFFFFF00000000000
BODY_MASK = 0x00000000FFFFFFFF

COMMAND = b"train.parquet"


def encapsulated(table: pa.Table) -> list[tuple[bytes, bytes | None]]:
    """Return the messages of `table`: flatbuffer and body, None for the schema."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    raw, at, messages = sink.getvalue().to_pybytes(), 0, []
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(raw))
    for message in reader:
        marker, length = struct.unpack_from("<Ii", raw, at)
        assert marker == 0xFFFFFFFF
        body = message.body.to_pybytes() if message.body is not None else None
        header = raw[at + 8 : at + 8 + length]
        at += 8 + length + len(body or b"")
        messages.append((header, None if message.type == "schema" else body or b""))
    return messages


def unpadded(header: bytes) -> bytes:
    """Return the flatbuffer with a length that is no multiple of 8, like the reference sends it."""
    return header + bytes(3)


class ReferenceServer:
    """A server of a table for one client after the other, with metadata on one connection and bodies on another."""

    def __init__(self, table: pa.Table) -> None:
        self._messages = encapsulated(table)
        self._context = Context()
        self._listening = Worker(self._context)
        self.port = self._listening.listen()
        self._stop = False
        self.failures: list[BaseException] = []
        self.asked: list[str] = []  # the streams in the order of their requests
        self.closed: list[str] = []  # in the order in which the client closed them
        self._threads: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="reference server")
        self._thread.start()

    @property
    def locations(self) -> list[str]:
        return [f"ucx://127.0.0.1:{self.port}?want_data={want}" for want in (WANT_METADATA, WANT_DATA)]

    def _run(self) -> None:
        while not self._stop:
            self._listening.until(lambda: self._stop or self._listening.requests, 1e6)
            while self._listening.requests:
                request = self._listening.requests.pop(0)
                worker = Worker(self._context)
                worker.accept(request, None)
                thread = threading.Thread(target=self._serve, args=(worker,), name="reference connection")
                thread.start()
                self._threads.append(thread)

    def _serve(self, worker: Worker) -> None:
        try:
            tag, ticket = worker.receive(WANT_DATA, ~METADATA_BITS & 0xFFFFFFFFFFFFFFFF)
            assert ticket == COMMAND
            stream = "metadata" if tag & METADATA_BITS else "bodies"
            self.asked.append(stream)
            if stream == "metadata":
                self._send_metadata(worker)
            else:
                self._send_bodies(worker)
            worker.until(lambda: worker.lost)  # a server must not close first
            self.closed.append(stream)
        except BaseException as error:
            self.failures.append(error)
        finally:
            worker.close()

    def _send_metadata(self, worker: Worker) -> None:
        for sequence, (header, _) in enumerate(self._messages):
            worker.send_message([struct.pack("<BI", 1, sequence), unpadded(header)])
        worker.send_message([struct.pack("<BI", 0, len(self._messages))])

    def _send_bodies(self, worker: Worker) -> None:
        for sequence, (_, body) in enumerate(self._messages):
            if body is not None:  # in pieces of 8 bytes and more, like buffers and their padding
                worker.send_tagged(sequence, [body[:8], body[8:64], body[64:]])

    def close(self) -> None:
        self._stop = True
        self._thread.join(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        self._listening.stop_listening()
        self._listening.close()
        self._context.close()
        if self.failures:
            raise self.failures[0]


class ReferenceFlight(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A Flight server that only knows descriptors of type CMD, and answers with two locations in one endpoint."""

    def __init__(self, server: ReferenceServer, schema: pa.Schema) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._locations = server.locations
        self._schema = schema

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        if descriptor.command != COMMAND:
            raise pa.ArrowInvalid(f"could not find schema for {descriptor.command!r}")
        return flight.FlightInfo(
            self._schema, descriptor, [flight.FlightEndpoint(descriptor.command, self._locations)], -1, -1
        )


class ReferenceClient:
    """A client that asks Flight, opens two connections, and reads a stream from each."""

    def __init__(self, catalog: str, command: bytes) -> None:
        with flight.connect(catalog) as client:
            info = client.get_flight_info(flight.FlightDescriptor.for_command(command))
        self._ticket = info.endpoints[0].ticket.ticket
        self._locations = [info.endpoints[0].locations[index].uri.decode() for index in (0, 1)]
        self.forms: set[str] = set()

    def read_all(self) -> pa.Table:
        """Return the whole stream, decoded by libarrow."""
        context = Context()
        metadata, data = Worker(context), Worker(context)
        for worker, location in zip((metadata, data), self._locations, strict=True):
            worker.connect(_port(location), None)
        for worker, location in zip((metadata, data), self._locations, strict=True):
            wanted = worker.send_tagged(_want(location), [self._ticket], sync=True)
            worker.until(partial(worker.done, wanted))
        metadata.until(lambda: any(one[0] == 0 for one in metadata.messages) and self._whole(metadata.messages))
        headers = {_sequence(one): one[5:] for one in metadata.messages if one[0] == 1}
        bodies = {
            sequence: data.receive(sequence, BODY_MASK)[1]
            for sequence in sorted(headers, reverse=True)
            if sequence  # the schema has no body
        }
        self.forms = metadata.forms
        metadata.close_endpoint()
        data.close_endpoint()
        metadata.close()
        data.close()
        context.close()
        stream = b"".join(
            struct.pack("<Ii", 0xFFFFFFFF, len(headers[n])) + headers[n] + bodies.get(n, b"") for n in sorted(headers)
        )
        return pa.ipc.open_stream(stream).read_all()

    @staticmethod
    def _whole(messages: list[bytes]) -> bool:
        """Return whether all messages have arrived: the end of the stream may have overtaken some."""
        (count,) = (_sequence(one) for one in messages if one[0] == 0)
        return len(messages) == count + 1


def _sequence(message: bytes) -> int:
    return int.from_bytes(message[1:5], "little")


def _port(location: str) -> int:
    return int(location.partition("?")[0].rpartition(":")[2])


def _want(location: str) -> int:
    query = dict(one.split("=") for one in location.partition("?")[2].split("&"))
    return int(query["want_data"])
