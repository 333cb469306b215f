"""UCX endpoints, each one end of a connection with the worker that drives it, and the callbacks from UCX."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

from dissociated.base.once import once
from dissociated.memory.remote import Span
from dissociated.protocol.close_reason import decode_reason
from dissociated.transport.native.ucx import libucp as c
from dissociated.transport.native.ucx.libucp import Ucp, ucp
from dissociated.transport.native.ucx.worker import Worker

METADATA, ABORT = 0, 1  # ids of active messages

_MAX_STEPS = 1000  # steps of progress for one closing endpoint before the next one gets its turn


class UcxEndpoint:
    """An end of a connection. Owns its worker and the keys of remote memory; `destroy` releases them.

    With `err_mode_none`, two processes of one host read each other's memory directly.
    """

    def __init__(self, worker: Worker, err_mode_none: bool) -> None:
        self.worker = worker
        self.err_mode_none = err_mode_none
        self.handle: Any = None  #: UCX's handle of the endpoint; None before `open` and after `destroy`
        self._ucp = worker.ucp
        self._lib = worker.ucp.lib
        self._callback_argument: Any = None
        self._keys: dict[Span, Any] = {}
        self._requests: list[Any] = []  # requests that have to end before this may be destroyed
        self._plain, _, self._force, *_ = params()

    def open(self, description: Any, owner: object, peer: str) -> None:
        """Begin to connect.

        Args:
            description: The UCX parameters of the endpoint. The error handler is added here.
            owner: The object whose methods UCX calls from now on; see `Callbacks`.
            peer: The name of the peer, for messages.

        Raises:
            TransportError: UCX refuses.
        """
        u = self._ucp
        called = callbacks()
        argument = self._callback_argument = u.ffi.new_handle(owner)
        handler = u.ffi.new("ucp_am_handler_param_t *")
        handler.field_mask = c.AM_HANDLER_ID | c.AM_HANDLER_FLAGS | c.AM_HANDLER_CB | c.AM_HANDLER_ARG
        handler.flags, handler.arg = c.AM_WHOLE_MESSAGE, argument
        for handler.id, handler.cb in ((METADATA, called.on_metadata), (ABORT, called.on_abort)):
            u.check(self._lib.ucp_worker_set_am_recv_handler(self.worker.handle, handler), "creating a worker")
        description.field_mask |= c.EP_PARAM_ERR_HANDLER
        description.err_handler.cb, description.err_handler.arg = called.on_lost, argument
        endpoint = u.ffi.new("ucp_ep_h *")
        u.check(self._lib.ucp_ep_create(self.worker.handle, description, endpoint), f"connecting to {peer}")
        self.handle = endpoint[0]

    def key(self, span: Span, peer: str) -> Any:
        """Return UCX's handle of the key of `span`, a span of the peer's memory.

        Raises:
            TransportError: The key is invalid.
        """
        if span not in self._keys:
            key = self._ucp.ffi.new("ucp_rkey_h *")
            status = self._lib.ucp_ep_rkey_unpack(self.handle, self._ucp.ffi.from_buffer(span.key), key)
            self._ucp.check(status, f"{peer}: its remote_handle cannot be used")
            self._keys[span] = key[0]
        return self._keys[span]

    def send_active(self, number: int, pointer: Any, length: int, param: Any) -> Any:
        """Begin to send an active message with the id `number`. Return UCX's result: NULL, an error or a request."""
        return self._lib.ucp_am_send_nbx(self.handle, number, self._ucp.ffi.NULL, 0, pointer, length, param)

    def begin_close(self, requests: Iterable[Any]) -> None:
        """Begin to close the endpoint and to notify the peer. `advance_closing` continues that.

        Args:
            requests: The sends and fetches in progress, which end with an error. The endpoint owns them from now on.
        """
        # Forced if the error mode allows it, so that a silent peer cannot delay the close. Messages that must arrive
        # were waited for before.
        closing = self._lib.ucp_ep_close_nbx(self.handle, self._plain if self.err_mode_none else self._force)
        if self._ucp.status(closing) == c.INPROGRESS:
            self._requests.append(closing)
        if not self.err_mode_none:  # in error mode none, requests to a dead peer never end
            # UCX keeps a request until no other connection sends from the same memory, and then writes to its worker,
            # which must not have been destroyed by then.
            self._requests += requests

    def advance_closing(self) -> bool:
        """Let UCX work on the close. Return whether the peer was notified and all copies have ended."""
        worker = self.worker
        for _ in range(_MAX_STEPS):
            moved = worker.progress()
            worker.discard_arrived()
            if not moved and worker.arm():  # UCX refuses to arm the worker while it copies
                break
        else:
            return False
        return not self._waits()

    @property
    def is_busy(self) -> bool:
        """Whether UCX would crash if this were destroyed now."""
        return not self.err_mode_none and self._waits()

    def _waits(self) -> bool:
        check = self._lib.ucp_request_check_status
        return any(check(request) == c.INPROGRESS for request in self._requests)

    def destroy(self) -> None:
        """Release all resources of UCX, including the worker."""
        for request in self._requests:
            self._lib.ucp_request_free(request)
        self._requests.clear()
        for key in self._keys.values():
            self._lib.ucp_rkey_destroy(key)
        self._keys.clear()
        self.worker.destroy()
        self.handle = self._callback_argument = None


class Callbacks:
    """The functions that UCX calls. Each gets the handle of the Python object that it concerns.

    Exceptions cannot pass through UCX. They also arise from signals, because Python handles a signal at its first
    bytecode after a wait in UCX, which is in one of these functions. So exceptions are passed to
    `callback_failed` of the object.
    """

    def __init__(self, u: Ucp) -> None:
        ffi = u.ffi

        def failed(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
            ffi.from_handle(trace.tb_frame.f_locals["arg"]).callback_failed(error)

        @ffi.callback("ucp_am_recv_callback_t", onerror=failed)  # type: ignore[untyped-decorator]
        def on_metadata(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            return int(ffi.from_handle(arg).receive_metadata(data, length, param.recv_attr))

        @ffi.callback("ucp_am_recv_callback_t", onerror=failed)  # type: ignore[untyped-decorator]
        def on_abort(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            if not param.recv_attr & c.AM_RECV_RNDV:
                ffi.from_handle(arg).traffic.give_up(decode_reason(bytes(ffi.buffer(data, length))))
            return 0

        @ffi.callback("ucp_err_handler_cb_t", onerror=failed)  # type: ignore[untyped-decorator]
        def on_lost(arg: Any, endpoint: Any, status: int) -> None:
            ffi.from_handle(arg).lose_by(status)

        @ffi.callback("ucp_listener_conn_callback_t", onerror=failed)  # type: ignore[untyped-decorator]
        def on_requested(request: Any, arg: Any) -> None:
            ffi.from_handle(arg).request_arrived(request)

        self.on_metadata, self.on_abort, self.on_lost, self.on_requested = on_metadata, on_abort, on_lost, on_requested


@once
def callbacks() -> Callbacks:
    """Return the callbacks of this process."""
    return Callbacks(ucp())


@once
def params() -> tuple[Any, ...]:
    """Return the parameters of UCX calls.

    Returns:
        The parameters for contiguous memory, for memory in pieces, for a forced close, for an active message of
        contiguous memory, and for one of memory in pieces.
    """
    new = ucp().ffi.new
    plain, pieces, force, am, am_pieces = (new("ucp_request_param_t *") for _ in range(5))
    pieces.op_attr_mask, pieces.datatype = c.OP_DATATYPE, c.DATATYPE_IOV
    force.op_attr_mask, force.flags = c.OP_FLAGS, c.EP_CLOSE_FORCE
    am.op_attr_mask, am.flags = c.OP_FLAGS, c.AM_SEND_REPLY
    am_pieces.op_attr_mask, am_pieces.flags = c.OP_FLAGS | c.OP_DATATYPE, c.AM_SEND_REPLY
    am_pieces.datatype = c.DATATYPE_IOV
    return plain, pieces, force, am, am_pieces
