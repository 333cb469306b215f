"""An endpoint of UCX: one end of a connection, with the worker that lets UCX work on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dissociated.memory.remote import Span
from dissociated.transport.native.ucx import _ucp as c
from dissociated.transport.native.ucx.callbacks import callbacks, params
from dissociated.transport.native.ucx.worker import Worker

METADATA, ABORT = 0, 1  # ids of active messages

_MAX_STEPS = 1000  # that UCX may make for an endpoint that is closed, before it is another's turn


class UcxEndpoint:
    """Owns its worker, and the keys of memory that it can fetch from. Give it back with `destroy`.

    With `err_mode_none` two processes of one host read each other's memory, each by itself.
    """

    def __init__(self, worker: Worker, err_mode_none: bool) -> None:
        self.worker = worker
        self.err_mode_none = err_mode_none
        self.handle: Any = None  #: UCX's own; None while there is none
        self._ucp = worker.ucp
        self._lib = worker.ucp.lib
        self._callback_argument: Any = None
        self._keys: dict[Span, Any] = {}
        self._requests: list[Any] = []  # that have to end before this may be destroyed
        self._plain, _, self._force, *_ = params()

    def open(self, description: Any, owner: object, peer: str) -> None:
        """Begin to connect, as `description` says; what concerns errors is added here. UCX calls `owner` from now on.

        Raises TransportError.
        """
        u = self._ucp
        called = callbacks()
        argument = self._callback_argument = u.ffi.new_handle(owner)
        handler = u.ffi.new("ucp_am_handler_param_t *")
        handler.field_mask = c.AM_HANDLER_ID | c.AM_HANDLER_FLAGS | c.AM_HANDLER_CB | c.AM_HANDLER_ARG
        handler.flags, handler.arg = c.AM_WHOLE_MESSAGE, argument
        for handler.id, handler.cb in ((METADATA, called.metadata), (ABORT, called.abort)):
            u.check(self._lib.ucp_worker_set_am_recv_handler(self.worker.handle, handler), "creating a worker")
        description.field_mask |= c.EP_PARAM_ERR_HANDLER
        description.err_handler.cb, description.err_handler.arg = called.lost, argument
        endpoint = u.ffi.new("ucp_ep_h *")
        u.check(self._lib.ucp_ep_create(self.worker.handle, description, endpoint), f"connecting to {peer}")
        self.handle = endpoint[0]

    def key(self, span: Span, peer: str) -> Any:
        """What opens this span of the peer's memory. Raises TransportError where its key is none."""
        if span not in self._keys:
            key = self._ucp.ffi.new("ucp_rkey_h *")
            status = self._lib.ucp_ep_rkey_unpack(self.handle, self._ucp.ffi.from_buffer(span.key), key)
            self._ucp.check(status, f"{peer}: its remote_handle cannot be used")
            self._keys[span] = key[0]
        return self._keys[span]

    def send_active(self, number: int, pointer: Any, length: int, param: Any) -> Any:
        """Begin to send an active message of this id. What UCX returns: NULL, an error or a request."""
        return self._lib.ucp_am_send_nbx(self.handle, number, self._ucp.ffi.NULL, 0, pointer, length, param)

    def begin_close(self, requests: Iterable[Any]) -> None:
        """Begin to tell the peer that this is closed. `advance_closing` goes on with it.

        `requests` are those that send or fetch, which end with an error. They are this object's from now on.
        """
        # By force where UCX knows that: a silent peer must not keep us. What counts was waited for before.
        closing = self._lib.ucp_ep_close_nbx(self.handle, self._plain if self.err_mode_none else self._force)
        if self._ucp.status(closing) == c.INPROGRESS:
            self._requests.append(closing)
        if not self.err_mode_none:  # where requests to a dead peer never end
            # UCX keeps a request until no other connection sends from its memory, and tells its worker then: a worker
            # that is destroyed before that is written to.
            self._requests += requests

    def advance_closing(self) -> bool:
        """Let UCX work. Whether the peer knows that this is closed, and nothing is copied any more."""
        worker = self.worker
        for _ in range(_MAX_STEPS):
            moved = worker.progress()
            worker.discard_arrived()
            if not moved and worker.arm():  # UCX does not let us sleep while it copies
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
        """Give everything back to UCX."""
        for request in self._requests:
            self._lib.ucp_request_free(request)
        self._requests.clear()
        for key in self._keys.values():
            self._lib.ucp_rkey_destroy(key)
        self._keys.clear()
        self.worker.destroy()
        self.handle = self._callback_argument = None
