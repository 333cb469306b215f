"""The pump of a live stream: the thread that reads its source and has the messages sent to the consumers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.codec.split import LargeBatch, SplitMessage, Splitter, split_small
from dissociated.datasets.consumer import Consumer, Encodings
from dissociated.datasets.fanout import Fanout
from dissociated.datasets.source_errors import source_errors
from dissociated.errors import DissociatedError, TransportError, log_level, log_message, peer_message

_log = logging.getLogger(__name__)

#: Factor by which the time of the last delivery shrinks with each message that was not delivered by the pump.
_DECAY = 0.9


class Pump:
    """The thread that reads `reader` once for all consumers. Errors call the stream `name`."""

    def __init__(self, name: str, reader: pa.RecordBatchReader, options: WriteOptions | None) -> None:
        self._name = name
        self._reader: pa.RecordBatchReader | None = reader
        self._options = options
        #: The first message of the stream.
        self.schema: SplitMessage = Splitter(reader.schema, options).schema_message
        self._thread: threading.Thread | None = None
        self._delivery_time = 0.0  # seconds of processor time for which this thread has last delivered a message

    def start(self, fanout: Fanout) -> None:
        """Start to read, and publish the messages in `fanout`. Call this until it has succeeded once.

        Raises:
            TransportError: The system has no more threads.
        """
        self._thread = threading.Thread(target=self._run, args=(fanout,), name=f"live {self._name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise TransportError(f"cannot start the thread to read {self._name!r}: {error}") from None

    def discard(self) -> None:
        """Release the source if the thread was not started. It must not be started after that."""
        if self._thread is None:
            self._reader = None

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the thread to end. It may be blocked in the source for longer."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, fanout: Fanout) -> None:
        reader, self._reader = self._reader, None
        reason = reference = None
        try:
            with source_errors(self._name):
                messages = split_small(reader, self._options)
                del reader
                next(messages)  # the schema, which consumers received when they joined
                requested = time.monotonic()
                for message in messages:
                    leisure = time.monotonic() - requested
                    goes_on = fanout.publish(message)
                    self._wake(fanout.take_waking(), leisure, isinstance(message, LargeBatch))
                    if not goes_on:
                        break
                    requested = time.monotonic()
        except DissociatedError as error:
            reason, reference = peer_message(error), error.reference
            _log.log(log_level(error), "live stream failed: dataset=%r error=%s", self._name, log_message(error))
        except BaseException:
            reason = f"the live stream {self._name!r} failed: see the log of the server"
            _log.exception("live stream failed, internal error: dataset=%r", self._name)
        finally:
            messages = None  # type: ignore[assignment]  # releases the source
            fanout.end(reason, reference)

    def _wake(self, waking: Sequence[Consumer], leisure: float, is_large: bool) -> None:
        """Have the newest message sent to consumers that wait for it. The source has taken `leisure` seconds for it.

        If sending takes less time than that, this thread sends: handing over to a thread for each consumer costs more.
        Otherwise the threads of the consumers send, several messages at a time. Large batches come too slowly for that,
        so this thread sends them, too. Processor time is compared, since this thread may be suspended. The fan-out must
        not be locked: a consumer needs it as soon as it wakes.
        """
        if not waking:
            return
        if leisure < self._delivery_time and not is_large:
            self._delivery_time *= _DECAY  # so that a single slow delivery does not decide forever
            for consumer in waking:
                consumer.wake()
            return
        began = time.thread_time()
        encodings: Encodings = {}
        for consumer in waking:
            deliver = consumer.deliver  # copied, because another thread may reset it
            if deliver is None:
                consumer.wake()
            else:
                deliver(encodings)
        self._delivery_time = time.thread_time() - began
